"""The rules that settings of several stages keep together."""

from flows.config import RunConfig
from tasks.errors import ConfigError
from tasks.rollout.environment import library_of
from tasks.train.rules import check_objective, check_offload

Rule = tuple[str, object, bool, str]
"""Field, its value, whether that is wrong, and what to do then."""
HEAD_MULTIPLE = 32
"""Widths of an attention head that vLLM's CPU kernels have are multiples of this."""


def check(config: RunConfig) -> None:
    """Refuse settings that contradict each other; ConfigError names the first."""
    for field, value, is_wrong, remedy in _rules(config):
        if is_wrong:
            raise ConfigError(field, value, remedy)
    check_objective(config.train)
    check_offload(config.train)


def _rules(config: RunConfig) -> list[Rule]:
    return [
        *_model_rules(config),
        *_rollout_rules(config),
        *_overlong_rules(config),
        *_trainer_rules(config),
        *_reference_rules(config),
    ]


def _model_rules(config: RunConfig) -> list[Rule]:
    """Those of the start model."""
    start_model = config.start_model
    return [
        (
            "model",
            config.model,
            bool(config.model) == start_model.enabled,
            "give the start model's folder, or set start_model.enabled=true, but not both",
        ),
        (
            "start_model.hidden_size",
            start_model.hidden_size,
            start_model.hidden_size % (HEAD_MULTIPLE * start_model.heads) != 0,
            f"must be a multiple of {HEAD_MULTIPLE} x start_model.heads, which is {start_model.heads}: vLLM's attention on "
            "CPU wants it",
        ),
    ]


def _rollout_rules(config: RunConfig) -> list[Rule]:
    """Those of sampling and its servers."""
    rollout, serve = config.rollout, config.serve
    return [
        (
            "rollout.max_in_flight",
            rollout.max_in_flight,
            rollout.max_in_flight < rollout.group_size,
            f"must hold one group at least: rollout.group_size is {rollout.group_size}",
        ),
        (
            "rollout.trajectories_per_task",
            rollout.trajectories_per_task,
            rollout.trajectories_per_task > rollout.group_size,
            f"must not exceed rollout.group_size, which is {rollout.group_size}; 0 is the whole group",
        ),
        (
            "rollout.keep_states",
            rollout.keep_states,
            bool(rollout.keep_states) and not library_of(rollout),
            f"is for environments of libraries; {rollout.environment} says itself what it keeps (docs/environments.md)",
        ),
        (
            "score.min_group_size",
            config.score.min_group_size,
            config.score.min_group_size > rollout.group_size,
            f"must not exceed rollout.group_size, which is {rollout.group_size}",
        ),
        (
            "rollout.max_completion_tokens",
            rollout.max_completion_tokens,
            rollout.max_completion_tokens >= serve.max_model_len,
            f"must be below serve.max_model_len, which is {serve.max_model_len}",
        ),
        (
            "serve.gpus",
            serve.gpus,
            len(serve.gpus) % serve.servers != 0,
            f"must be shared out evenly between serve.servers, which is {serve.servers}",
        ),
    ]


def _overlong_rules(config: RunConfig) -> list[Rule]:
    """Those of overlong reward shaping."""
    limit, cache = config.score.overlong_limit_tokens, config.score.overlong_cache_tokens
    longest = config.serve.max_model_len - 1
    return [
        (
            "score.overlong_limit_tokens",
            limit,
            limit > longest,
            f"no answer gets so long: serve.max_model_len is {config.serve.max_model_len}, the prompt included; give at "
            f"most {longest}, or 0 for no shaping",
        ),
        (
            "score.overlong_cache_tokens",
            cache,
            cache > 0 and not limit,
            "goes with score.overlong_limit_tokens, which is 0: give both, or neither",
        ),
        (
            "score.overlong_cache_tokens",
            cache,
            limit > 0 and not 0 < cache < limit,
            f"must be 1 to {limit - 1}: the loss of reward rises over the last so many tokens below "
            f"score.overlong_limit_tokens, which is {limit}",
        ),
    ]


def _trainer_rules(config: RunConfig) -> list[Rule]:
    """Those of what one update is made of."""
    rollout, train = config.rollout, config.train
    n_rows, n_parts = config.trajectories_per_step, train.ranks * train.updates_per_step
    return [
        (
            "rollout.groups_per_step",
            rollout.groups_per_step,
            n_rows < n_parts and not config.retrain.sources,
            f"a step samples {n_rows} trajectories (with rollout.group_size = {rollout.group_size}), and trains them on "
            f"train.ranks = {train.ranks} in train.updates_per_step = {train.updates_per_step} updates: each rank needs "
            "one of each update at least; sample more, or take fewer ranks or updates",
        ),
        (
            "train.micro_batch_tokens",
            train.micro_batch_tokens,
            train.micro_batch_tokens < config.serve.max_model_len,
            f"must hold the longest sequence: serve.max_model_len is {config.serve.max_model_len}",
        ),
        (
            "train.replay_routing",
            train.replay_routing,
            train.replay_routing and not (rollout.keep_routing or config.retrain.sources),
            "replays the experts stored with the rollouts: set rollout.keep_routing=true, or set it to false",
        ),
    ]


def _reference_rules(config: RunConfig) -> list[Rule]:
    """Those of the reference policy."""
    rollout, train = config.rollout, config.train
    return [
        (
            "train.kl.reference",
            train.kl.reference,
            train.kl.reference == "none" and train.kl.coef > 0.0,
            f"train.kl.coef = {train.kl.coef:g} needs a reference policy: set train.kl.reference to frozen (a copy in the "
            "trainer) or deployment (vLLM servers at train.kl.urls), or train.kl.coef to 0",
        ),
        (
            "train.kl.urls",
            list(train.kl.urls),
            train.kl.reference == "deployment" and not train.kl.urls,
            "give the addresses (http://host:port) of the vLLM servers with the reference policy, for train.kl.reference: "
            "deployment; or set it to frozen",
        ),
        (
            "rollout.temperature",
            rollout.temperature,
            train.kl.reference == "deployment" and rollout.temperature != 1.0,
            "must be 1 with train.kl.reference: deployment, since vLLM does not divide the logits of a prompt by a "
            "temperature; or set train.kl.reference to frozen, which does",
        ),
    ]
