"""Environments that misbehave as a problem's number says; worker processes import them by path."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rollmill.tasks.rollout.environment import Episode, Example, Message, Split

BLOCKING, CRASHING, RAISING, SLOW, NUMPY, UNSENDABLE = 1, 2, 3, 4, 5, 6


class Planted:
    """Answers `pong N`, N its worker's process; problem 1 blocks the worker, 2 ends it, 3 raises, 4 never answers."""

    name = "planted"
    tools = ({"type": "function", "function": {"name": "pong"}},)
    stop = (">",)
    states = MappingProxyType({"pings": "list<int64>"})

    def size(self, split: Split) -> int:
        return 8 if split == "train" else 2

    async def example(self, split: Split, index: int) -> Example:
        return Example(f"{split} {index}", {"number": index})

    def episode(self, example: Example, seed: int) -> Episode:
        return PlantedEpisode(int(str(example.content["number"])), seed)


class PlantedEpisode:
    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not messages:
            return (Message("user", f"ping {self.seed}"),)
        if len(messages) > 2:
            return ()
        if self.number == BLOCKING:
            block()
        if self.number == CRASHING:
            os._exit(3)
        if self.number == RAISING:
            raise LookupError("no such ping")
        if self.number == SLOW:
            await asyncio.sleep(600)
        return (Message("tool", f"pong {os.getpid()}", name="pong"),)

    async def close(self) -> Mapping[str, object]:
        if self.number == NUMPY:
            return {"episode": self}
        return {"seed": self.seed}

    def state(self) -> Mapping[str, object]:
        return {"pings": self if self.number == UNSENDABLE else [self.seed, self.number]}


def block() -> None:
    """Block, and leave a file first that shows it."""
    Path(os.environ["ROLLMILL_PLANTED_BLOCKS"]).touch()
    time.sleep(600)


class NeverUp(Planted):
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no data")


class DiesAtOnce(Planted):
    """Every episode of it ends its worker."""

    def episode(self, example: Example, seed: int) -> Episode:
        os._exit(4)
