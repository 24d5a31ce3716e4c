"""How many calls of scorers wait and run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tasks.observe.metrics import ALL, Metric


class Load:
    """At most `limit` turns at once, in order of arrival, and what happened since it was last read.

    Attributes:
        name: of its metrics, score/NAME_...
        restarts: workers that were replaced.
        timeouts: calls that took too long.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.restarts = self.timeouts = 0
        self._slots = asyncio.Semaphore(limit)
        self._depth = self._active = self._most_deep = self._most_active = 0

    @asynccontextmanager
    async def slot(self, n_calls: int = 1) -> AsyncIterator[None]:
        """Wait for a turn, and keep it, for so many calls one after another."""
        self._depth += n_calls
        self._most_deep = max(self._most_deep, self._depth)
        try:
            async with self._slots:
                self._active += 1
                self._most_active = max(self._most_active, self._active)
                try:
                    yield
                finally:
                    self._active -= 1
        finally:
            self._depth -= n_calls

    def metrics(self) -> list[Metric]:
        """Most calls handed over and not done, most turns taken at once, restarts and timeouts, since the last time."""
        found = [
            Metric(f"score/{self.name}_depth", ALL, "max", self._most_deep),
            Metric(f"score/{self.name}_active", ALL, "max", self._most_active),
            Metric(f"score/{self.name}_restarts", ALL, "value", self.restarts),
            Metric(f"score/{self.name}_timeouts", ALL, "value", self.timeouts),
        ]
        self._most_deep, self._most_active = self._depth, self._active
        self.restarts = self.timeouts = 0
        return found
