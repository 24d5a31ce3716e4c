"""Settings of held-out evaluation, and of each of a run's environments if it has several."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializationInfo,
    field_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rollmill.tasks.config import StageConfig, setting
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.user_code.plug_in import PlugIn

LARGEST_WEIGHT = 10_000


class EvaluateConfig(StageConfig):
    """Settings of held-out evaluation."""

    every: int = setting(
        10,
        "Steps between two evaluations; the first and the last version are evaluated too. 0: no evaluation, and a run that "
        "trains from stored rollouts needs no vLLM server.",
        ge=0,
        basic=True,
    )
    n_prompts: int = setting(256, "Number of held-out prompts, the same each time.", ge=1, fixed=True)
    samples: int = setting(
        1,
        "Sampled answers to each held-out prompt, from which mean reward and pass@k are computed; a greedy one comes on top.",
        ge=1,
        le=1024,
        fixed=True,
    )
    temperature: float = setting(
        0.0, "Temperature of the sampled answers; 0: rollout.temperature.", ge=0.0, le=10.0, fixed=True
    )
    scorer: PlugIn = setting(
        PlugIn(), "Scorer of held-out trajectories, one by one; empty: score.scorer.", fixed=True
    )


OF_ENVIRONMENT = frozenset(
    {
        *("rollout.environment", "rollout.prompts", "rollout.keep_states"),
        "rollout.problem_weight",
        *("rollout.max_prompt_tokens", "rollout.long_prompts", "rollout.max_completion_tokens"),
        *("rollout.temperature", "rollout.sampling", "rollout.trajectory_timeout_s"),
        *("rollout.agent", "rollout.sandbox"),
        *("rollout.env_workers", "rollout.env_timeout_s", "rollout.env_worker_max_episodes"),
        *("score.scorer", "score.sum", "score.judge", "score.reward_model", "score.timeout_s"),
        *("score.sandbox", "score.overlong_tokens"),
        *("evaluate.n_prompts", "evaluate.samples", "evaluate.temperature", "evaluate.scorer"),
    }
)
"""Settings, and sections of settings, that an environment may have other values of than the run."""


def _refuse_all(name: str) -> str:
    if name == ALL:
        remedy = f"{ALL} is the name in metrics of all environments together: give another"
        raise PydanticCustomError("reserved", "{remedy}", {"remedy": remedy})
    return name


# A name is a value of columns, part of a folder's name, and of a setting's dotted name.
EnvironmentName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$"), AfterValidator(_refuse_all)]


def may_differ(name: str) -> bool:
    """Return True if an environment may have another value of a setting, given by its dotted name, than the run."""
    return any(name == each or name.startswith(f"{each}.") for each in OF_ENVIRONMENT)


class EnvironmentConfig(StageConfig):
    """One of a run's several environments: its weight, and the settings in which it differs from the run."""

    name: EnvironmentName = setting(
        ...,
        "Its name, in the column env of its rows and in names of metrics: letters, digits, _ and -; not all.",
    )
    weight: int = setting(
        1, "Share of a step's groups, relative to the weights of the others.", ge=1, le=LARGEST_WEIGHT
    )
    rollout: RolloutConfig = setting(RolloutConfig(), "Its environment, prompts and sampling.")
    score: ScoreConfig = setting(ScoreConfig(), "Its scorer.")
    evaluate: EvaluateConfig = setting(EvaluateConfig(), "Its held-out evaluation.")

    @model_validator(mode="after")
    def _refuse_settings_of_the_run(self) -> Self:
        for name in self.overrides():
            if not may_differ(name):
                remedy = f"{name} is the same for all environments: set it outside of environments"
                raise PydanticCustomError("run_setting", "{remedy}", {"remedy": remedy})
        return self

    @field_serializer("rollout", "score", "evaluate")
    def _write_overrides(self, section: StageConfig, info: SerializationInfo) -> dict[str, Any]:
        # With its defaults, a stored entry would override settings of the run that it leaves alone.
        return section.model_dump(mode=info.mode, exclude_unset=True)

    def overrides(self) -> list[str]:
        """List the settings, by the dotted names that the run has them under, that this environment has other values of."""
        sections = ("rollout", "score", "evaluate")
        return [f"{name}.{each}" for name in sections for each in _given(getattr(self, name))]


def _given(section: StageConfig) -> Iterator[str]:
    for name in sorted(section.model_fields_set):
        value = getattr(section, name)
        if isinstance(value, StageConfig):
            yield from (f"{name}.{each}" for each in _given(value))
        else:
            yield name


def read_entries(given: object) -> object:
    """Return the value of `environments` as a list, of one given by name: {"add": {"weight": 2}} gives [{"name": "add", "weight": 2}]."""
    if not isinstance(given, Mapping):
        return given
    return [
        {"name": name, **(entry or {})} if isinstance(entry, Mapping | None) else entry
        for name, entry in given.items()
    ]


def order_entries(entries: tuple[EnvironmentConfig, ...]) -> tuple[EnvironmentConfig, ...]:
    """Return the entries by name; raises PydanticCustomError for a name that is given twice."""
    names = [each.name for each in entries]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        remedy = f"{twice} is given twice: give each environment another name"
        raise PydanticCustomError("twice", "{remedy}", {"remedy": remedy})
    return tuple(sorted(entries, key=lambda each: each.name))


Environments = Annotated[
    tuple[EnvironmentConfig, ...], BeforeValidator(read_entries), AfterValidator(order_entries)
]
