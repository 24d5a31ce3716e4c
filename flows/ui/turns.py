"""Parts as task runs: each begins and ends in its turn, and ends with words for people and without a result."""

import asyncio
from typing import Protocol

from prefect.client.schemas.objects import State
from prefect.results import ResultRecordMetadata  # type: ignore[attr-defined]  # it is not among its exports
from prefect.serializers import JSONSerializer
from prefect.states import Completed

NO_RESULT = ResultRecordMetadata(storage_key="none", serializer=JSONSerializer())
"""Stands for the result that no task run has: given one, Prefect makes no record, with a path, for each."""


class SampledPart(Protocol):
    """A part of a group that is sampled."""

    async def sample(self) -> str:
        """Sample it; returns how it went, in words."""


class ScoredPart(Protocol):
    """A part of a group that is scored."""

    async def score(self) -> str:
        """Score it; returns how it went, in words."""


class Turns:
    """One at a time goes on, a turn of the event loop after the one before.

    Prefect's own work at a task run's begin and end holds the loop for about 1 ms each time: a hundred parts that
    become ready at once would hold it for a hundred times that.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait for one's turn."""
        async with self._lock:
            await asyncio.sleep(0)

    async def done(self, how: str) -> State[object]:
        """Wait for one's turn to end; returns the state of a task run that went well, which says how."""
        await self.next()
        return Completed(message=how, data=NO_RESULT)


class SampledInTurn:
    """A part that is sampled, whose task run ends in its turn."""

    __slots__ = ("_part", "_turns")

    def __init__(self, part: SampledPart, turns: Turns) -> None:
        self._part, self._turns = part, turns

    async def sample(self) -> State[object]:
        return await self._turns.done(await self._part.sample())


class ScoredInTurn:
    """A part that is scored, whose task run ends in its turn."""

    __slots__ = ("_part", "_turns")

    def __init__(self, part: ScoredPart, turns: Turns) -> None:
        self._part, self._turns = part, turns

    async def score(self) -> State[object]:
        return await self._turns.done(await self._part.score())
