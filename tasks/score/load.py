"""How many calls of scorers wait and run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tasks.observe.metrics import ALL, Metric


class Load:
    """At most `limit` calls at once, in order of arrival, and what happened since it was last read.

    Attributes:
        name: of its metrics, score/NAME_...
        restarts: workers that were replaced.
        timeouts: calls that took too long.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.restarts = self.timeouts = 0
        self._slots = asyncio.Semaphore(limit)
        self._waiting = self._active = self._most_waiting = self._most_active = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn, and keep it."""
        await self._turn()
        self._active += 1
        self._most_active = max(self._most_active, self._active)
        try:
            yield
        finally:
            self._active -= 1
            self._slots.release()

    async def _turn(self) -> None:
        if self._slots.locked():
            self._most_waiting = max(self._most_waiting, self._waiting + 1)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1

    def metrics(self) -> list[Metric]:
        """Most calls that waited and ran at once, restarts and timeouts since the last time."""
        found = [
            Metric(f"score/{self.name}_depth", ALL, "max", self._most_waiting),
            Metric(f"score/{self.name}_active", ALL, "max", self._most_active),
            Metric(f"score/{self.name}_restarts", ALL, "value", self.restarts),
            Metric(f"score/{self.name}_timeouts", ALL, "value", self.timeouts),
        ]
        self._most_waiting, self._most_active = self._waiting, self._active
        self.restarts = self.timeouts = 0
        return found
