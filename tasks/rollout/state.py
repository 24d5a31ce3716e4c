"""What an environment keeps of its episodes, beside their outcome: typed columns, which scorers do not see."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tasks.errors import ConfigError, SchemaError
from tasks.rollout.environment import Environment, Episode
from tasks.rollout.foreign import described, foreign_code
from tasks.store.states import check_columns

FIELD = "rollout.environment"


class KeepsState(Protocol):
    """An environment whose episodes have a `state`.

    Attributes:
        states: Arrow type of each column by the column's name, types as in tasks.store.states.TYPES.
    """

    states: Mapping[str, str]


@runtime_checkable
class StatefulEpisode(Protocol):
    """An episode of such an environment."""

    def state(self) -> Mapping[str, object]:
        """Values of the environment's `states`; asked once, after `close`. A column that is left out is null."""


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """What an episode keeps.

    Attributes:
        error: why there are no values; empty when there is no reason.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    error: str = ""


NO_STATE = EpisodeState()


def states_of(environment: Environment) -> Mapping[str, str]:
    """The columns that an environment keeps, by name; empty for most.

    Raises:
        ConfigError: a column's name or type cannot be stored.
    """
    columns = _declared(environment)
    try:
        check_columns(columns)
    except SchemaError as error:
        raise ConfigError(FIELD, environment.name, f"the states it keeps are wrong: {error}") from error
    return columns


def state_of(environment: Environment, episode: Episode) -> EpisodeState:
    """What an episode that is closed keeps; what it raises is kept instead, since no trajectory fails for its state."""
    if not _declared(environment):
        return NO_STATE
    if not isinstance(episode, StatefulEpisode):
        return EpisodeState(error="the environment has states, its episode has no method state()")
    try:
        with foreign_code():
            given = episode.state()
            if not isinstance(given, Mapping):
                return EpisodeState(error=f"expected a mapping from state(), it gave {type(given).__name__}")
            return EpisodeState(given)
    except Exception as raised:  # noqa: BLE001 - environments are foreign code: the row says what was raised
        return EpisodeState(error=": ".join(described(raised)))


def _declared(environment: Environment) -> Mapping[str, str]:
    """What a KeepsState has, and nothing of others; asked of every trajectory, for which `isinstance` is too slow."""
    states: Mapping[str, str] = getattr(environment, "states", {})
    return states
