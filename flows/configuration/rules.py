"""The rules that settings of several stages must keep together."""

import re
from collections.abc import Iterable, Sequence

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import environment_configs, list_altered, name_environment
from rollmill.tasks.errors import ConfigError, show_value
from rollmill.tasks.rollout.environment import environment_library
from rollmill.tasks.score.terms import SCORERS
from rollmill.tasks.store.folders import S3_SCHEME
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.train.config import START_MODEL_POSITIONS, CheckpointConfig, TrainConfig
from rollmill.tasks.train.setting_rules import HAS_RATIO, check_objective, check_offload

# A setting's dotted name, whether its value is wrong, and what to do then.
Rule = tuple[str, bool, str]
# Policy versions; asynchronous training is rarely stable above some ten.
MOST_STALENESS = 32


def check_config(config: RunConfig, *, trains: bool = True) -> None:
    """Refuse settings that contradict each other; ConfigError names the first.

    Args:
        config: all settings.
        trains: False where nothing is trained, so that settings of training may have any value.
    """
    _check_rules(config, _environments_rules(config))
    _check_rules(config, _executor_rules(config))
    of_environment = (_model_rules, _rollout_rules, _overlong_rules, *([_reference_rules] if trains else ()))
    for name, each in environment_configs(config).items():
        with name_environment(config, name):
            _check_rules(each, (rule for rules in of_environment for rule in rules(each)))
    _check_rules(config, _serve_rules(config))
    if not trains:
        return
    _check_rules(config, _trainer_rules(config))
    # The trainer checks its settings with these too, so they raise instead of returning errors.
    check_objective(config.train)
    check_offload(config.train)


def _check_rules(config: RunConfig, rules: Iterable[Rule]) -> None:
    for field, is_wrong, remedy in rules:
        if is_wrong:
            raise ConfigError(field, get_setting(config.model_dump(mode="json"), field, None), remedy)


def check_sampling(config: RunConfig) -> None:
    """Refuse to train on rollouts whose sampling nothing corrects for (`check_correction`, `_check_replay`).

    The sampling settings of a run that trains from stored rollouts are those of its evaluations alone.
    """
    if not config.retrain.sources:
        check_correction(config.train, list_altered(config))
        _check_replay(config)


def check_correction(train: TrainConfig, altered: Sequence[str]) -> None:
    """Refuse to train, without importance weights, on tokens that were not sampled from the trained distribution.

    The trained distribution is softmax(logits / temperature). The stored log-probabilities are those of the distribution that tokens
    were sampled from, so the ratio to them is below 1 from the start where tokens were left out.

    Args:
        train: settings of the trainer.
        altered: the settings of sampling that make the two differ (`list_altered`).

    Raises:
        ConfigError: names the setting of the trainer to change.
    """
    if not altered:
        return
    mode, level = train.importance.mode, train.importance.level
    why = f"{', '.join(altered)}: tokens are sampled from another distribution than the one that is trained"
    undo = "or train on what was sampled without it (docs/how-to/rollouts.md)"
    has_ratio = HAS_RATIO.get(train.loss.name, True)
    if mode == "none":
        further = (
            " and train.old_logprobs to trainer" if has_ratio and train.old_logprobs == "sampler" else ""
        )
        remedy = f"{why}; set it to truncated{further}, so that each token is weighted by the ratio of both, {undo}"
        raise ConfigError("train.importance.mode", mode, remedy)
    if has_ratio and train.old_logprobs == "sampler":
        remedy = f"{why}, and the ratio of the loss {train.loss.name} would not begin at 1; set it to trainer, {undo}"
        raise ConfigError("train.old_logprobs", train.old_logprobs, remedy)
    if level == "sequence_mean":
        remedy = f"{why}, and a geometric mean over the answer does not correct that; set it to token, {undo}"
        raise ConfigError("train.importance.level", level, remedy)


def _check_replay(config: RunConfig) -> None:
    """Refuse stored groups in a step, which earlier policies sampled, if no ratio to these policies is in the gradient."""
    train, share = config.train, config.rollout.replay.share
    if not share:
        return
    if train.replay_routing:
        remedy = (
            "stored groups have no routed experts any more: set it to false, or rollout.replay.share to 0"
        )
        raise ConfigError("train.replay_routing", True, remedy)
    has_ratio = HAS_RATIO.get(train.loss.name, True)
    if train.importance.mode == "none" and not (has_ratio and train.old_logprobs == "sampler"):
        and_old = "" if has_ratio else f", since the loss {train.loss.name} has no ratio"
        remedy = (
            f"rollout.replay.share = {share:g}: earlier policies sampled the stored groups; set it to truncated{and_old}, so that each "
            "token is weighted by the ratio of both policies (docs/how-to/rollouts.md)"
        )
        raise ConfigError("train.importance.mode", train.importance.mode, remedy)


def describe_altered(altered: Sequence[str]) -> str:
    """Return a line about settings by which tokens are sampled from another distribution than the trained one; empty for none."""
    if not altered:
        return ""
    return (
        f"{', '.join(altered)}: stored log-probabilities are those of the distribution that tokens are sampled from, not of the "
        "trained one; training corrects for that with train.importance (docs/how-to/rollouts.md)"
    )


# The paper of GSPO clips the ratio of a whole answer at 4e-4 (arXiv:2507.18071); from here on hardly any answer is clipped.
WIDE_GSPO_CLIP = 0.05


def list_warnings(config: RunConfig) -> list[str]:
    """Return a warning, one line each, for settings that are valid but rarely intended."""
    train, steps = config.train, config.steps
    n_updates = steps * train.epochs * train.updates_per_step
    warnings: list[Rule] = [
        ("train.lr", train.lr == 0.0, "no weight changes"),
        (
            "train.lr_decay_updates",
            train.lr_decay != "none" and train.min_lr_ratio == 0.0 and n_updates > train.lr_decay_updates,
            f"the run has {n_updates} updates, and the learning rate is 0 after that many: see train.min_lr_ratio",
        ),
        (
            "train.clip_high",
            train.loss.name == "gspo" and train.clip_high >= WIDE_GSPO_CLIP,
            "gspo clips the ratio of a whole answer, which rarely leaves so wide a range: see the preset gspo",
        ),
        (
            "train.kl.estimator",
            train.kl.reference != "none" and train.kl.estimator == "k1" and train.kl.apply_to == "loss",
            "the gradient of k1 in the loss has mean 0, so it only adds noise: k2 and k3 are for the loss",
        ),
        (
            "rollout.max_staleness",
            config.rollout.max_staleness > MOST_STALENESS,
            f"trajectories more than {MOST_STALENESS} policy versions old rarely help",
        ),
        (
            "train.warmup_steps",
            train.warmup_steps >= n_updates and train.warmup_steps != TrainConfig().warmup_steps,
            f"the run has {n_updates} updates, and the learning rate does not reach train.lr before its end",
        ),
        (
            "checkpoint.every",
            config.checkpoint.every > steps and config.checkpoint.every != CheckpointConfig().every,
            f"the run has {steps} steps, and its only checkpoint is at the end",
        ),
    ]
    values = config.model_dump(mode="json")
    return [
        f"{field} = {show_value(get_setting(values, field, None))}: {what}"
        for field, is_warned, what in warnings
        if is_warned
    ]


def _executor_rules(config: RunConfig) -> list[Rule]:
    """Return the rules for what actors in other processes cannot do."""
    is_remote = config.executor.kind == "ray" and not config.retrain.sources
    return [
        (
            "store.root",
            is_remote and config.store.root.startswith(S3_SCHEME),
            "actors write to a folder that all machines of the cluster share, not to S3: give one, or set executor.kind=local",
        ),
        (
            "train.kl.reference",
            is_remote and config.train.kl.reference == "deployment",
            "the flow has no tokens to ask a deployment for with executor.kind: ray; set it to frozen, or executor.kind=local",
        ),
        (
            "serve.urls",
            is_remote and bool(config.executor.address) and not config.serve.urls,
            "actors on other machines reach no server that the run launches on this one: give the addresses of running servers, or no "
            "executor.address",
        ),
        (
            "executor.address",
            bool(config.executor.address) and config.executor.kind == "local",
            "is for executor.kind: ray: set that too",
        ),
    ]


def _environments_rules(config: RunConfig) -> list[Rule]:
    """Return the rules for several environments in one run."""
    return [
        (
            "environments",
            bool(config.environments) and bool(config.retrain.sources),
            "training from stored rollouts has the environments of its sources, in the shares in which they are stored (see "
            "retrain.where), and evaluates the one of rollout.environment: leave this empty",
        ),
    ]


def _model_rules(config: RunConfig) -> list[Rule]:
    """Return the rules for the settings that a run needs: a start model, prompts and a scorer."""
    is_made, rollout, score = config.start_model.steps > 0, config.rollout, config.score
    return [
        (
            "model",
            bool(config.model) == is_made,
            "give a folder or a name on the Hugging Face hub, or start_model.steps=900 for a tiny model that the run trains first; "
            "not both",
        ),
        (
            "serve.max_model_len",
            is_made and config.serve.max_model_len > START_MODEL_POSITIONS,
            f"must not exceed {START_MODEL_POSITIONS}: a start model made here has no more positions",
        ),
        (
            "rollout.prompts.path",
            rollout.environment.name == "prompts" and not rollout.prompts.path,
            "give the file, folder or name of a data set with prompts, or another rollout.environment",
        ),
        (
            "score.scorer",
            not score.scorer and not score.sum,
            f"name the scorer that gives rewards: {', '.join(sorted(SCORERS))}, or your own as package.module:function "
            "(docs/how-to/scorers.md)",
        ),
    ]


def _rollout_rules(config: RunConfig) -> list[Rule]:
    """Return the rules for the settings of sampling."""
    rollout, serve = config.rollout, config.serve
    return [
        (
            "rollout.max_in_flight",
            rollout.max_in_flight < rollout.group_size,
            f"must be at least one group: rollout.group_size is {rollout.group_size}",
        ),
        (
            "rollout.trajectories_per_task",
            rollout.trajectories_per_task > rollout.group_size,
            f"must not exceed rollout.group_size, which is {rollout.group_size}; 0 is the whole group",
        ),
        (
            "rollout.chat_template",
            bool(rollout.chat_template) and config.start_model.steps > 0,
            "is for a given model: a start model made here learns conversations without a template; set start_model.steps=0",
        ),
        (
            "rollout.keep_states",
            bool(rollout.keep_states) and not environment_library(rollout),
            f"is for library environments only; {rollout.environment.name} declares its states itself (docs/how-to/environments.md)",
        ),
        (
            "score.min_group_size",
            config.score.min_group_size > rollout.group_size,
            f"must not exceed rollout.group_size, which is {rollout.group_size}",
        ),
        (
            "rollout.max_prompt_tokens",
            rollout.max_prompt_tokens >= serve.max_model_len,
            f"must be below serve.max_model_len, which is {serve.max_model_len}",
        ),
        (
            "rollout.long_prompts",
            rollout.long_prompts == "keep_end" and not rollout.max_prompt_tokens,
            "keeps the last rollout.max_prompt_tokens tokens of a prompt: give their number",
        ),
        (
            "rollout.max_completion_tokens",
            rollout.max_completion_tokens >= serve.max_model_len,
            f"must be below serve.max_model_len, which is {serve.max_model_len}",
        ),
    ]


def _serve_rules(config: RunConfig) -> list[Rule]:
    """Return the rules for the settings of the vLLM servers."""
    serve = config.serve
    return [
        (
            "serve.extra_args",
            (serve.dtype, config.train.head_dtype) == ("bfloat16", "float32")
            and any(re.match("--hf[-_]overrides(=|$)", each) for each in serve.extra_args),
            "--hf-overrides with all its values replaces the head_dtype that train.head_dtype sets: give each value by itself, as "
            "--hf-overrides.NAME and VALUE",
        ),
        (
            "serve.gpus",
            len(serve.gpus) % serve.servers != 0,
            f"must be a multiple of serve.servers, which is {serve.servers}",
        ),
        (
            "serve.sleep",
            serve.sleep and (not serve.share_gpus or bool(serve.urls)),
            "is for launched servers that leave their GPU to the trainer: set serve.share_gpus=true, and no serve.urls",
        ),
        (
            "serve.sleep",
            serve.sleep and config.rollout.max_staleness > 0,
            "servers that sample for the next step while the trainer trains cannot sleep: set rollout.max_staleness=0, or "
            "serve.sleep=false",
        ),
    ]


def _overlong_rules(config: RunConfig) -> list[Rule]:
    """Return the rules for `score.overlong_tokens`, the two lengths between which long answers lose more and more reward."""
    lengths, longest = config.score.overlong_tokens, config.serve.max_model_len - 1
    return [
        (
            "score.overlong_tokens",
            bool(lengths) and not (len(lengths) == 2 and 0 < lengths[0] < lengths[1]),
            "must be two lengths in tokens [A, B], 0 < A < B: the loss of reward rises from A to B; or [] for no shaping",
        ),
        (
            "score.overlong_tokens",
            max(lengths, default=0) > longest,
            f"no completion can be that long: serve.max_model_len is {config.serve.max_model_len}, the prompt included; give at "
            f"most {longest}, or [] for no shaping",
        ),
    ]


def _trainer_rules(config: RunConfig) -> list[Rule]:
    """Return the rules for the settings of an update's batches and micro-batches."""
    rollout, train = config.rollout, config.train
    n_rows, n_parts = config.trajectories_per_step, train.ranks * train.updates_per_step
    return [
        (
            "rollout.groups_per_step",
            n_rows < n_parts and not config.retrain.sources,
            f"a step samples {n_rows} trajectories (with rollout.group_size = {rollout.group_size}), and trains them on "
            f"train.ranks = {train.ranks} in train.updates_per_step = {train.updates_per_step} updates: each rank needs "
            "one of each update at least; sample more, or take fewer ranks or updates",
        ),
        (
            "train.micro_batch_tokens",
            train.micro_batch_tokens < config.serve.max_model_len,
            f"must be at least as long as the longest sequence: serve.max_model_len is {config.serve.max_model_len}",
        ),
        (
            "train.replay_routing",
            train.replay_routing and not (rollout.keep_routing or config.retrain.sources),
            "replays the experts stored with the rollouts: set rollout.keep_routing=true, or set it to false",
        ),
    ]


def _reference_rules(config: RunConfig) -> list[Rule]:
    """Return the rules for the settings of the reference policy of the KL term."""
    rollout, train = config.rollout, config.train
    is_distilled = config.score.advantage.name == "zero"
    return [
        (
            "train.kl.reference",
            train.kl.reference == "none" and train.kl.coef > 0.0,
            f"train.kl.coef = {train.kl.coef:g} needs a reference policy: set train.kl.reference to frozen (a copy in the "
            "trainer), deployment (vLLM servers at train.kl.urls) or stored (a teacher's stored log-probabilities), or "
            "train.kl.coef to 0",
        ),
        (
            "train.kl.reference",
            train.kl.reference == "stored" and not config.retrain.sources,
            "reads a teacher's log-probabilities of stored rollouts, for `rollmill retrain`; a run that samples has new ones: set it "
            "to frozen (train.kl.model) or deployment (train.kl.urls)",
        ),
        (
            "train.kl.coef",
            is_distilled and train.kl.coef == 0.0,
            "must be above 0 with score.advantage: zero, since nothing but the KL term trains then",
        ),
        (
            "train.kl.model",
            is_distilled and train.kl.reference == "frozen" and not train.kl.model,
            "give the teacher's folder, or its name on the Hugging Face hub: without it the reference is the start model, which has "
            "nothing to teach; or set train.kl.reference to deployment (train.kl.urls) or stored (train.kl.teacher)",
        ),
        (
            "train.kl.urls",
            train.kl.reference == "deployment" and not train.kl.urls,
            "give the addresses (http://host:port) of the vLLM servers with the reference policy, for train.kl.reference: "
            "deployment; or set it to frozen",
        ),
        (
            "rollout.temperature",
            train.kl.reference == "deployment" and rollout.temperature != 1.0,
            "must be 1 with train.kl.reference: deployment, since vLLM does not divide the logits of a prompt by a "
            "temperature; or set train.kl.reference to frozen, which does",
        ),
    ]
