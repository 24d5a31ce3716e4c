"""Limit the concurrent calls of scorers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmill.tasks.observe.metrics import ALL, Metric


class CallSlots:
    """Limits concurrent calls of scorers to `limit`, in order of arrival, and counts them for the metrics.

    Attributes:
        name: name in the metrics, score/NAME_...
        restarts: number of replaced workers.
        timeouts: number of calls that took too long.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.restarts = self.timeouts = 0
        self._slots = asyncio.Semaphore(limit)
        self._depth = self._active = self._most_deep = self._most_active = 0

    @asynccontextmanager
    async def slot(self, n_calls: int = 1) -> AsyncIterator[None]:
        """Wait for a slot and hold it until the block ends; `n_calls` is the number of calls made in it, one by one."""
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
        """Return the peaks of pending calls and of used slots, and the worker restarts and timeouts, since the last call."""
        found = [
            Metric(f"score/{self.name}_depth", ALL, "max", self._most_deep),
            Metric(f"score/{self.name}_active", ALL, "max", self._most_active),
            Metric(f"score/{self.name}_restarts", ALL, "value", self.restarts),
            Metric(f"score/{self.name}_timeouts", ALL, "value", self.timeouts),
        ]
        # Calls that are still pending count in the next reading too.
        self._most_deep, self._most_active = self._depth, self._active
        self.restarts = self.timeouts = 0
        return found
