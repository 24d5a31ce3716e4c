"""RunConfig: the stages' settings composed; presets, overrides, and the rules that cross stages."""

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flows.presets import preset_values
from tasks.config import StageConfig, nearest, setting
from tasks.errors import ConfigError
from tasks.observe.config import ObserveConfig
from tasks.rollout.config import RolloutConfig
from tasks.rollout.environment import library_of
from tasks.score.config import ScoreConfig
from tasks.serve.config import ServeConfig
from tasks.store.config import StoreConfig
from tasks.store.fixed import value_of
from tasks.sync.config import SyncConfig
from tasks.train.config import StartModelConfig, TrainConfig
from tasks.train.rules import check_objective

Config = TypeVar("Config", bound=StageConfig)


class EvaluateConfig(StageConfig):
    """Held-out evaluation, greedy and sampled."""

    enabled: bool = setting(
        True, "Evaluate at all; without, a run that trains from stored rollouts needs no vLLM server."
    )
    every: int = setting(
        10, "Steps between two evaluations; the first and the last version always have one.", ge=1
    )
    n_prompts: int = setting(512, "Held-out prompts, the same each time.", ge=1, fixed=True)
    scorer: str = setting("", "Scorer of held-out trajectories, one by one; empty: score.scorer.", fixed=True)
    prompts_per_task: int = setting(64, "Held-out prompts of one evaluation task run.", ge=1)


class RetrainConfig(StageConfig):
    """Training from stored rollouts and a scores data set; only the flow retrain goes by it."""

    sources: tuple[str, ...] = setting(
        (), "Runs whose rollouts are trained on: folders, or s3://bucket/prefix.", fixed=True
    )
    scores: str = setting("", "NAME@VERSION of the scores that rewards come from.", fixed=True)
    groups_per_step: int = setting(
        32,
        "Groups of one step, drawn from all that can be trained on; none comes twice in one pass over them.",
        ge=1,
        fixed=True,
    )
    first_step: int = setting(0, "First step of the sources to draw from.", ge=0, fixed=True)
    last_step: int = setting(
        -1, "Last step of the sources to draw from; -1: all that they have trained on.", ge=-1, fixed=True
    )


class RescoreConfig(StageConfig):
    """All settings of the flow rescore."""

    score: ScoreConfig = setting(ScoreConfig(), "The scorer, and where it runs.")
    store: StoreConfig = setting(StoreConfig(), "The data sets.")
    observe: ObserveConfig = setting(ObserveConfig(), "What is measured and recorded.")
    first_step: int = setting(0, "First step to score.", ge=0)
    last_step: int = setting(-1, "Last step to score; -1: the last one there is.", ge=-1)
    redo_failed: bool = setting(False, "Score again what the scorer failed on.")
    max_failed_share: float = setting(
        0.5, "Share of the scores within the bounds that may fail before rescoring stops.", ge=0.0, le=1.0
    )
    evaluations: bool = setting(False, "Score stored held-out trajectories too.")
    groups_per_task: int = setting(32, "Groups that one score task run scores.", ge=1)
    tasks_in_flight: int = setting(4, "Score task runs at the same time; what they score is in memory.", ge=1)


class RunConfig(StageConfig):
    """All settings of a run."""

    seed: int = setting(0, "Seed of prompts, sampling and the start model.", ge=0, lt=2**31, fixed=True)
    steps: int = setting(40, "Steps of the whole run.", ge=1)
    model: str = setting(
        "", "Folder of the start model (Hugging Face format); empty with start_model.enabled.", fixed=True
    )
    start_model: StartModelConfig = setting(StartModelConfig(), "Make a small start model here.")
    rollout: RolloutConfig = setting(RolloutConfig(), "Sampling.")
    score: ScoreConfig = setting(ScoreConfig(), "Scoring and advantages.")
    train: TrainConfig = setting(TrainConfig(), "The trainer.")
    sync: SyncConfig = setting(SyncConfig(), "Weights from the trainer to the servers.")
    serve: ServeConfig = setting(ServeConfig(), "The vLLM servers.")
    store: StoreConfig = setting(StoreConfig(), "The data sets.")
    evaluate: EvaluateConfig = setting(EvaluateConfig(), "Held-out evaluation.")
    observe: ObserveConfig = setting(ObserveConfig(), "What is measured and recorded.")
    retrain: RetrainConfig = setting(RetrainConfig(), "Training from stored rollouts.")

    @property
    def trajectories_per_step(self) -> int:
        """P x G."""
        return self.rollout.groups_per_step * self.rollout.group_size


HEAD_MULTIPLE = 32
"""Widths of an attention head that vLLM's CPU kernels have are multiples of this."""


def load(preset: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a preset (see preset_values), apply `key.subkey=value` overrides, and check it all.

    Example: load("quickstart+dapo", ("train.lr=1e-6", "steps=2"))

    Raises:
        ConfigError: the preset is missing, or a setting is unknown, out of range or contradicts another.
    """
    return validate(overridden(preset_values(preset), overrides))


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Settings with `key.subkey=value` overrides applied; ConfigError for one that is not written so."""
    values = copy.deepcopy(values)
    for override in overrides:
        _apply(values, override)
    return values


def validate(values: dict[str, Any]) -> RunConfig:
    """Check settings, those that belong to several stages included.

    Raises:
        ConfigError: names the first wrong field, its value and what is allowed.
    """
    config = parsed(RunConfig, values)
    check(config)
    return config


def parsed(model: type[Config], values: dict[str, Any]) -> Config:
    """Settings of a kind; ConfigError names the first wrong field, its value and what is allowed."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        remedy = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(field, first["input"], f"{remedy}{_meant(model, field, first)}") from None


def check(config: RunConfig) -> None:
    """Refuse settings that contradict each other; ConfigError names the first."""
    for field, value, is_wrong, remedy in _cross_stage_rules(config):
        if is_wrong:
            raise ConfigError(field, value, remedy)
    check_objective(config.train)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError("--set", override, "write it as key=value, for example train.lr=1e-6")
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError("--set", override, f"{section} is a single setting, not a section")
    values[name] = _value(text)


def _value(text: str) -> Any:
    """YAML's reading of a value; 1e-6, which YAML takes for text, is a number."""
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError("--set", text, f"the value is not YAML: {error}") from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _meant(model: type[StageConfig], field: str, error: ErrorDetails) -> str:
    """The setting, or the choice of one, that is written nearly so; empty for other errors."""
    if error["type"] == "extra_forbidden":
        return nearest(field, settings(model))
    if error["type"] == "literal_error":
        return nearest(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    return ""


def settings(model: type[StageConfig] = RunConfig, prefix: str = "") -> dict[str, bool]:
    """Every setting by its dotted name; True for those that may not change when a run is resumed."""
    found: dict[str, bool] = {}
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, StageConfig):
            found |= settings(section, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _is_fixed(field)
    return found


def _is_fixed(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return bool(isinstance(extra, dict) and extra["fixed"])


def fixed_settings() -> dict[str, object]:
    """Defaults, by dotted name, of the settings that may not change when a run is resumed."""
    defaults = RunConfig().model_dump(mode="json")
    return {name: value_of(defaults, name, None) for name, is_fixed in settings().items() if is_fixed}


def _cross_stage_rules(config: RunConfig) -> list[tuple[str, object, bool, str]]:
    """(field, value, is wrong, remedy) of each rule."""
    rollout, start_model, train = config.rollout, config.start_model, config.train
    return [
        *_overlong_rules(config),
        *_batch_rules(config),
        (
            "model",
            config.model,
            bool(config.model) == start_model.enabled,
            "give the start model's folder, or set start_model.enabled=true, but not both",
        ),
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
            rollout.max_completion_tokens >= config.serve.max_model_len,
            f"must be below serve.max_model_len, which is {config.serve.max_model_len}",
        ),
        (
            "serve.gpus",
            config.serve.gpus,
            len(config.serve.gpus) % config.serve.servers != 0,
            f"must be shared out evenly between serve.servers, which is {config.serve.servers}",
        ),
        (
            "train.micro_batch_tokens",
            train.micro_batch_tokens,
            train.micro_batch_tokens < config.serve.max_model_len,
            f"must hold the longest sequence: serve.max_model_len is {config.serve.max_model_len}",
        ),
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
        (
            "train.replay_routing",
            train.replay_routing,
            train.replay_routing and not (rollout.keep_routing or config.retrain.sources),
            "replays the experts stored with the rollouts: set rollout.keep_routing=true, or set it to false",
        ),
        (
            "start_model.hidden_size",
            start_model.hidden_size,
            start_model.hidden_size % (HEAD_MULTIPLE * start_model.heads) != 0,
            f"must be a multiple of {HEAD_MULTIPLE} x start_model.heads, which is {start_model.heads}: vLLM's attention on "
            "CPU wants it",
        ),
    ]


def _overlong_rules(config: RunConfig) -> list[tuple[str, object, bool, str]]:
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


def _batch_rules(config: RunConfig) -> list[tuple[str, object, bool, str]]:
    """Those of what one update is made of."""
    rollout, train = config.rollout, config.train
    n_rows, n_parts = config.trajectories_per_step, train.ranks * train.updates_per_step
    return [
        (
            "rollout.groups_per_step",
            rollout.groups_per_step,
            n_rows < n_parts,
            f"a step samples {n_rows} trajectories (with rollout.group_size = {rollout.group_size}), and trains them on "
            f"train.ranks = {train.ranks} in train.updates_per_step = {train.updates_per_step} updates: each rank needs "
            "one of each update at least; sample more, or take fewer ranks or updates",
        ),
    ]


def describe(model: type[StageConfig] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every setting as a line: name, default, whether it may not change when a run is resumed, meaning."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, StageConfig):
            yield from describe(section, f"{prefix}{name}.")
        else:
            mark = " (fixed)" if _is_fixed(field) else ""
            yield f"{prefix}{name} = {field.default!r}{mark}: {field.description}"
