"""Measures when slots are held."""

import asyncio
import time
from dataclasses import dataclass, field

from benchmarks.schedules.timeline import Interval


@dataclass
class Stopwatch:
    """Sleeps in the place of rollouts and scores, and notes when.

    Attributes:
        origin_s: moment of `time.perf_counter` that intervals count from.
    """

    origin_s: float = field(default_factory=time.perf_counter)
    rollouts: list[Interval] = field(default_factory=list)
    scores: list[Interval] = field(default_factory=list)

    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.origin_s

    async def rollout(self, seconds: float) -> None:
        """Hold a rollout slot."""
        await self._hold(seconds, self.rollouts)

    async def score(self, seconds: float) -> None:
        """Hold a scoring slot."""
        await self._hold(seconds, self.scores)

    async def _hold(self, seconds: float, intervals: list[Interval]) -> None:
        started_s = self.elapsed_s()
        await asyncio.sleep(seconds)
        intervals.append(Interval(started_s, self.elapsed_s()))
