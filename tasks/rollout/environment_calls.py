"""Call an environment safely: validate what it returns, convert its exceptions to episode errors, read its state columns."""

import asyncio
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Protocol, get_args, runtime_checkable
from urllib.parse import quote

from rollmill.tasks.errors import (
    ConfigError,
    EpisodeError,
    EpisodeTimeoutError,
    ForeignError,
    SchemaError,
    ServiceError,
    describe_error,
)
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import (
    Conversation,
    Environment,
    Episode,
    Example,
    Message,
    Split,
    TokenCounts,
)
from rollmill.tasks.store.environment_states import check_columns
from rollmill.tasks.user_code.left_threads import run_to_end

NO_PROBLEM = Example("", {})
"""Placeholder in the row of a trajectory whose problem the environment could not give."""


@contextmanager
def guard_environment_code() -> Iterator[None]:
    """Convert SystemExit, and a CancelledError that was not requested, to ForeignError inside the `with` block.

    Raises:
        ForeignError: for SystemExit, and for CancelledError if this task was not cancelled.
    """
    try:
        yield
    except SystemExit as raised:
        raise ForeignError("SystemExit", f"the environment would end the process: {raised}") from raised
    except asyncio.CancelledError as raised:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ForeignError("CancelledError", "the environment cancelled itself") from raised


def check_messages(given: object) -> tuple[Message, ...]:
    """Validate an environment's messages; raises EpisodeError if they are invalid."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise EpisodeError(f"expected a sequence of Message, the environment gave {type(given).__name__}")
    messages = tuple(given)
    for message in messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise EpisodeError(
                f"expected a sequence of Message with text, the environment gave {message!r:.200}"
            )
        _check_json("a message", message.as_json())
    return messages


def check_reply(given: object) -> tuple[Message, ...] | Conversation:
    """Validate what `Episode.reply` returned: messages, or a Conversation; raises EpisodeError if it is neither, or invalid."""
    if not isinstance(given, Conversation):
        return check_messages(given)
    tools: object = given.tools
    if tools is not None:
        if not _are_all(tools, Mapping):
            raise EpisodeError(
                f"expected a sequence of JSON schemas as tools, the environment gave {tools!r:.200}"
            )
        _check_json("a tool", tools)
    return Conversation(check_messages(given.messages), given.tools)


def check_opening(given: object, environment: Environment) -> Conversation:
    """Return the conversation that an episode of the environment opens with, and its tools; raises EpisodeError if it is invalid."""
    opening = check_reply(given)
    if not isinstance(opening, Conversation):
        return Conversation(opening, environment.tools)
    return opening if opening.tools is not None else replace(opening, tools=environment.tools)


def check_outcome(given: object) -> Mapping[str, object]:
    """Validate an episode's outcome; raises EpisodeError if it is no JSON object."""
    if not isinstance(given, Mapping):
        raise EpisodeError(
            f"expected a mapping from Episode.close, the environment gave {type(given).__name__}"
        )
    _check_json("the outcome", dict(given))
    return given


def check_example(given: object) -> Example:
    """Validate a problem; raises EpisodeError if it is invalid, or its content is no JSON object."""
    if not isinstance(given, Example) or not isinstance(given.content, Mapping):
        raise EpisodeError(f"expected an Example, the environment gave {type(given).__name__}")
    try:
        given.example_id.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        text = (
            f"expected a text in UTF-8 as the id of a problem, the environment gave {given.example_id!r:.100}"
        )
        raise EpisodeError(text) from error
    _check_json("the problem", dict(given.content))
    return given


def _check_json(what: str, value: object) -> None:
    try:
        json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"{what} is not JSON: {error}") from error


async def fetch_problem(
    environment: Environment, split: Split, index: int, timeout_s: float
) -> tuple[Example, Exception | None]:
    """Return (problem, None), or (placeholder, error) if the environment could not give the problem with this index.

    Raises:
        ServiceError: the environment's workers cannot be restarted.
    """
    try:
        with guard_environment_code():
            async with asyncio.timeout(timeout_s) as limit:
                return check_example(await environment.example(split, index)), None
    except ServiceError:
        raise
    except TimeoutError as error:
        if not limit.expired():
            return NO_PROBLEM, error
        text = f"no problem {index} within rollout.trajectory_timeout_s = {timeout_s:g} s"
        return NO_PROBLEM, EpisodeTimeoutError(text)
    except Exception as error:  # noqa: BLE001 - the trajectories of this problem are failed rows
        return NO_PROBLEM, error


FIELD = "rollout.environment"
# The name is a column of every row and part of a folder's name, where one that is not ASCII is much longer.
LONGEST_NAME, LONGEST_QUOTED_NAME = 100, 240
MOST_PROBLEMS = 10_000_000


def check_environment(environment: Environment, config: RolloutConfig) -> Episode:
    """Refuse an environment that lacks something, or fails at its first problem or the opening of its episode.

    It is tried in this process, within `rollout.trajectory_timeout_s` seconds, without a policy. Returns the closed episode.

    Raises:
        ConfigError: names the setting and what is wrong.
    """
    try:
        with guard_environment_code():
            check_environment_name(config.environment.name, environment.name)
            fault, episode = _find_wrong_attribute(environment), None
            if not fault:
                fault, episode = run_to_end(lambda: _try_opening(environment, config.trajectory_timeout_s))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - environments are foreign code: whatever it raises
        kind, text = describe_error(error)
        fault, episode = f"{kind}: {text}", None
    if fault or episode is None:
        # Python's own text does not say what to write.
        how = ": write the method as `async def`" if "in 'await' expression" in fault else ""
        raise ConfigError(
            FIELD, config.environment.name, f"{fault}{how}; docs/how-to/environments.md has the interface"
        )
    return episode


def check_environment_name(given: str, name: object) -> None:
    """Refuse a name that rows, metrics or folders cannot have, of the environment that the setting gives; raises ConfigError."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        remedy = f"its name is {name!r:.100}; give a text of 1 to {LONGEST_NAME} printable characters"
        raise ConfigError(FIELD, given, remedy)
    if len(quote(name, safe="")) > LONGEST_QUOTED_NAME:
        raise ConfigError(FIELD, given, f"its name is {name!r}, too long for a folder; give a shorter one")
    if name == ALL:
        remedy = (
            "this name is reserved for metrics of all environments together; give the environment another"
        )
        raise ConfigError(FIELD, ALL, remedy)


def _find_wrong_attribute(environment: Environment) -> str:
    """Return what is wrong about an environment's `size`, `tools`, `stop` or `states`; empty if nothing is."""
    for split in get_args(Split):
        size: object = environment.size(split)
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 0:
            return f"size({split!r}) must return a number of problems, and returned {size!r:.100}"
        # The numbers of all problems are shuffled at the start of each epoch.
        if int(size) > MOST_PROBLEMS:
            return f"size({split!r}) must be at most {MOST_PROBLEMS}, and is {size!r:.100}"
    tools: object = environment.tools
    if not _are_all(tools, Mapping):
        return f"its tools must be a sequence of JSON schemas, and are {tools!r:.100}"
    _check_json("a tool", tools)
    if not _are_all(environment.stop, str):
        return f"its stop must be a sequence of texts, and is {environment.stop!r:.100}"
    states: object = _state_types(environment)
    if not isinstance(states, Mapping):
        return f"its states must be a mapping of column types by name, and are {states!r:.100}"
    return ""


def _are_all(given: object, kind: type) -> bool:
    return (
        isinstance(given, Collection)
        and not isinstance(given, str | bytes)
        and all(isinstance(each, kind) for each in given)
    )


async def _try_opening(environment: Environment, timeout_s: float) -> tuple[str, Episode | None]:
    """Return what fails about the first training problem or the opening of its episode, empty if nothing does, and the episode.

    Raises:
        Exception: whatever the environment raises when it makes the opening.
    """
    if not environment.size("train"):
        return "it has no training problem", None
    example, error = await fetch_problem(environment, "train", 0, timeout_s)
    if error is not None:
        return f'example("train", 0) failed: {": ".join(describe_error(error))}', None
    async with asyncio.timeout(timeout_s):
        with guard_environment_code():
            episode = environment.episode(example, 0)
            try:
                opening = check_opening(await episode.reply(()), environment)
            finally:
                # Without an answer of the policy it may fail, as it may in a run.
                with suppress(Exception):
                    await episode.close()
    if not callable(getattr(episode, "close", None)):
        return "its episode has no method close", None
    return "" if opening.messages else "the opening of its first episode has no message", episode


@runtime_checkable
class CountingEpisode(Protocol):
    """An episode that is given the token counts of each completion, before its `reply` to it."""

    def take_counts(self, counts: TokenCounts) -> None:
        """Take the token counts of the policy's last message."""


def report_counts(episode: Episode, counts: TokenCounts | None) -> None:
    """Give an episode the token counts of the policy's last message, if it takes them; None: there is no message yet."""
    if counts is not None and isinstance(episode, CountingEpisode):
        episode.take_counts(counts)


@runtime_checkable
class CutEpisode(Protocol):
    """An episode that is given the policy's message that a limit of tokens cut, before its `close`: there is no `reply` to it."""

    def take_cut(self, message: Message) -> None:
        """Take the message; with `take_counts` its token counts were given before."""


def report_cut(episode: Episode, message: Message | None, counts: TokenCounts | None) -> None:
    """Give an episode the message that was cut, and its token counts, if it takes them; None: no message was cut."""
    if message is not None and isinstance(episode, CutEpisode):
        report_counts(episode, counts)
        episode.take_cut(message)


@runtime_checkable
class StatefulEpisode(Protocol):
    """An episode that gives values for its environment's `states` once it is closed."""

    def state(self) -> Mapping[str, object]:
        """Return values by column of the environment's `states`; called once, after `close`. A missing column is null."""


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """The values that an episode's `state` returned by column, or the error why there are none.

    Attributes:
        error: why there are no values; empty without an error.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    error: str = ""


NO_STATE = EpisodeState()


def state_columns(environment: Environment) -> Mapping[str, str]:
    """Return the Arrow type of each state column of an environment, by name; empty for most environments.

    Raises:
        ConfigError: a column's name or type cannot be stored.
    """
    columns = _state_types(environment)
    try:
        check_columns(columns)
    except SchemaError as error:
        raise ConfigError(FIELD, environment.name, f"the states it keeps are wrong: {error}") from error
    return columns


def read_episode_state(environment: Environment, episode: Episode) -> EpisodeState:
    """Read the state of a closed episode; an exception is stored as its error, and does not fail the trajectory."""
    if not _state_types(environment):
        return NO_STATE
    if not isinstance(episode, StatefulEpisode):
        return EpisodeState(error="the environment has states, its episode has no method state()")
    try:
        with guard_environment_code():
            given = episode.state()
            if not isinstance(given, Mapping):
                return EpisodeState(error=f"expected a mapping from state(), it gave {type(given).__name__}")
            return EpisodeState(given)
    except Exception as raised:  # noqa: BLE001 - environments are foreign code: the row says what was raised
        return EpisodeState(error=": ".join(describe_error(raised)))


def _state_types(environment: Environment) -> Mapping[str, str]:
    """Return the attribute `states` of an environment, or {} without it: the Arrow type of each state column by name.

    The types are those of rollmill.tasks.store.environment_states.TYPES.
    """
    states: Mapping[str, str] = getattr(environment, "states", {})
    return states
