"""Environments that fail in one way each; tests name them by import path."""

import sys
import threading
from collections.abc import Sequence
from typing import Any

from rollmill.tasks.rollout.environment import Episode, Example, Message
from rollmill.tasks.rollout.environments.addition import Addition


class Raising(Addition):
    """Cannot be created, for a reason that is no error of import."""

    def __init__(self) -> None:
        raise RuntimeError("no data")


class Ending(Addition):
    """Ends the process when it is created."""

    def __init__(self) -> None:
        raise SystemExit(0)


class LongestName(Addition):
    name = "x" * 100


class LongName(Addition):
    name = "x" * 101


class ControlName(Addition):
    name = "\x1b[31m"


class HalfName(Addition):
    name = "\ud800"


class NumberName(Addition):
    name: Any = 3


class EmptyName(Addition):
    name = ""


class NoName:
    """Has no attribute that an environment has."""


class AsyncSize(Addition):
    async def size(self, split: object) -> Any:
        return 3


class TextSize(Addition):
    def size(self, split: object) -> Any:
        return "many"


class RaisingSize(Addition):
    def size(self, split: object) -> Any:
        raise OSError("no disk")


class EndlessSize(Addition):
    def size(self, split: object) -> int:
        return sys.maxsize


class NumberedStates(Addition):
    @property
    def states(self) -> Any:
        return {3: "int64"}


class NumberedExample(Addition):
    async def example(self, *args: Any) -> Any:
        return Example(3, {})  # type: ignore[arg-type]


class HalfExample(Addition):
    async def example(self, *args: Any) -> Any:
        return Example("\ud800", {})


class NoTraining(Addition):
    def size(self, split: object) -> int:
        return 0


class NumberTools(Addition):
    tools: Any = 3


class TextStop(Addition):
    stop: Any = "abc"


class NumberStates(Addition):
    states: Any = 3


class RaisingExample(Addition):
    async def example(self, *args: Any) -> Any:
        raise KeyError("question")


class NoExample(Addition):
    async def example(self, *args: Any) -> Any:
        return None


class BlockingExample(Addition):
    def example(self, *args: Any) -> Any:
        return {}


class NoEpisode(Addition):
    def episode(self, *args: Any) -> Any:
        return None


class _Episode:
    def __init__(self, opening: Any) -> None:
        self._opening = opening

    async def reply(self, messages: object) -> Any:
        if isinstance(self._opening, BaseException):
            raise self._opening
        return self._opening

    async def close(self) -> Any:
        raise LookupError("no answer")


class EndingOpening(Addition):
    def episode(self, *args: Any) -> Any:
        return _Episode(SystemExit())


class TextOpening(Addition):
    def episode(self, *args: Any) -> Any:
        return _Episode("47+38=")


class EmptyOpening(Addition):
    def episode(self, *args: Any) -> Any:
        return _Episode(())


class Tools(Addition):
    """Offers a tool, whose messages some chat templates leave out."""

    tools: Any = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


class Turns(Addition):
    """Has episodes of several turns, which some chat templates cannot write."""

    def episode(self, example: Example, seed: int) -> Episode:
        return TwoTurns(super().episode(example, seed))


class TwoTurns:
    def __init__(self, asked: Episode) -> None:
        self.asked = asked

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return await self.asked.reply(messages) or (Message("user", "again"),) * (len(messages) < 3)

    async def close(self) -> dict[str, object]:
        return {}


def block() -> Any:
    """Never return, as code that waits without `await`; a daemon thread that does ends with the process."""
    threading.Event().wait()


class BlockingConstructor(Addition):
    def __init__(self) -> None:
        block()


class BlockingSize(Addition):
    def size(self, split: object) -> Any:
        return block()


class WaitingExample(Addition):
    async def example(self, split: object, index: int) -> Any:
        return block()


class WaitingEpisode(Addition):
    def episode(self, example: Example, seed: int) -> Any:
        return block()


class WaitingReply(Addition):
    def episode(self, example: Example, seed: int) -> Any:
        return self

    async def reply(self, messages: Sequence[Message]) -> Any:
        return block()
