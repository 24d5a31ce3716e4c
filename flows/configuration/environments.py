"""The environments of a run: the settings of each, and which groups it has."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environment_config import EnvironmentConfig, may_differ
from rollmill.tasks.config import StageConfig
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.run.group_shares import GroupShares

Section = TypeVar("Section", bound=StageConfig)


def environment_configs(config: RunConfig) -> Mapping[str, RunConfig]:
    """Return the settings of each environment by its name, ordered by name: those of the run, with what the environment overrides.

    A run without `environments` has one, which is named when it is opened: the result is {"": config}.
    """
    if not config.environments:
        return {"": config}
    return {entry.name: _overlay_entry(config, entry) for entry in config.environments}


def _overlay_entry(config: RunConfig, entry: EnvironmentConfig) -> RunConfig:
    score = _overlay(config.score, entry.score)
    if "scorer" in entry.score.model_fields_set and "sum" not in entry.score.model_fields_set:
        # With a sum, `scorer` is not used, and the sum is the run's.
        score = score.model_copy(update={"sum": ()})
    sections = {
        "rollout": _overlay(config.rollout, entry.rollout),
        "evaluate": _overlay(config.evaluate, entry.evaluate),
    }
    return config.model_copy(update={**sections, "score": score, "environments": ()})


def _overlay(section: Section, given: Section) -> Section:
    """Return a section with the values that were set in `given`, and in its sections."""
    values = {}
    for name in given.model_fields_set:
        mine, other = getattr(section, name), getattr(given, name)
        values[name] = _overlay(mine, other) if isinstance(other, StageConfig) else other
    return section.model_copy(update=values)


def group_shares(config: RunConfig) -> GroupShares:
    """Return which environment each group belongs to, by its index among the names of `environment_configs`."""
    weights = tuple(entry.weight for entry in config.environments) or (1,)
    rollout = config.rollout
    return GroupShares(weights, rollout.groups_per_step, rollout.max_refill_groups)


@contextmanager
def name_environment(config: RunConfig, name: str) -> Iterator[None]:
    """Make a ConfigError within about a setting that an environment may override name the environment's setting."""
    try:
        yield
    except ConfigError as error:
        if not config.environments or not may_differ(error.field):
            raise
        raise ConfigError(f"environments.{name}.{error.field}", error.value, error.remedy) from error


def list_altered(config: RunConfig) -> list[str]:
    """List the settings, with their values, by which an environment samples from another distribution than the trained one.

    Example: ["environments.add.rollout.sampling.top_p = 0.9"].
    """
    found: dict[str, None] = {}
    own = {entry.name: entry.overrides() for entry in config.environments}
    for name, each in environment_configs(config).items():
        for text in each.rollout.sampling.list_altered():
            is_own = text.partition(" = ")[0] in own.get(name, ())
            found[f"environments.{name}.{text}" if is_own else text] = None
    return list(found)
