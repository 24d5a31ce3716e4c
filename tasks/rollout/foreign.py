"""What an environment gives and raises, made safe: it is foreign code, and a bad rollout is data."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from tasks.errors import EpisodeError, EpisodeTimeoutError, ForeignError, ServiceError, printable, text_of
from tasks.rollout.environment import Environment, Example, Message, Split

NO_PROBLEM = Example("", {})
"""Stands in the row of a trajectory whose problem the environment could not give."""


@contextmanager
def foreign_code() -> Iterator[None]:
    """Make an error of what foreign code should not raise: the end of the process, and a cancellation of its own.

    Raises:
        ForeignError: in place of SystemExit, and of CancelledError when nobody cancelled this task.
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


def checked_messages(given: object) -> tuple[Message, ...]:
    """What an environment said, as messages; EpisodeError when it is none."""
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


def checked_outcome(given: object) -> Mapping[str, object]:
    """What an environment said of an episode's end; EpisodeError when it is no JSON object."""
    if not isinstance(given, Mapping):
        raise EpisodeError(
            f"expected a mapping from Episode.close, the environment gave {type(given).__name__}"
        )
    _check_json("the outcome", dict(given))
    return given


def checked_example(given: object) -> Example:
    """A problem; EpisodeError when it is none, or its content no JSON object."""
    if not isinstance(given, Example) or not isinstance(given.content, Mapping):
        raise EpisodeError(f"expected an Example, the environment gave {type(given).__name__}")
    _check_json("the problem", dict(given.content))
    return given


def _check_json(what: str, value: object) -> None:
    try:
        json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"{what} is not JSON: {error}") from error


async def problem_of(
    environment: Environment, split: Split, index: int, timeout_s: float
) -> tuple[Example, Exception | None]:
    """A problem, or what stands in its place and why the environment could not give it.

    Raises:
        ServiceError: the environment's workers cannot be brought back.
    """
    try:
        with foreign_code():
            async with asyncio.timeout(timeout_s) as limit:
                return checked_example(await environment.example(split, index)), None
    except ServiceError:
        raise
    except TimeoutError as error:
        if not limit.expired():
            return NO_PROBLEM, error
        text = f"no problem {index} within rollout.trajectory_timeout_s = {timeout_s:g} s"
        return NO_PROBLEM, EpisodeTimeoutError(text)
    except Exception as error:  # noqa: BLE001 - the trajectories of this problem are failed rows
        return NO_PROBLEM, error


def described(error: Exception) -> tuple[str, str]:
    """Type and text of an error, as a row keeps them."""
    kind = error.kind if isinstance(error, ForeignError) else type(error).__name__
    return printable(kind), text_of(error)
