"""Admission of trajectories: a fixed number of slots, given to whoever has waited longest among the most urgent."""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

from tasks.observe.spans import span

Urgency: TypeAlias = tuple[int, int]
"""Smaller ones come first: (step, kind of work)."""

SLOT = "slot"
"""Cause of a wait: as many trajectories are in flight as may be."""

ROLLOUT, EVALUATION = 0, 1
"""Kinds of work of one step: its rollouts come before the evaluation of its policy version."""


class Place:
    """A place in the line for one slot.

    Attributes:
        granted: done when the slot is there.
        granted_ns: when that was, by `time.perf_counter_ns`; 0 before.
        is_over: True once it was given up, or used.
    """

    def __init__(self) -> None:
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False
        self.granted_ns = 0

    async def turn(self, until: float | None = None) -> None:
        """Wait until the slot is granted.

        Raises:
            TimeoutError: it was not until this moment of the event loop's clock, in seconds.
        """
        if not self.granted.done():
            with span("waiting_for_server", cause=SLOT):
                async with asyncio.timeout_at(until):
                    await asyncio.shield(self.granted)


class Admission:
    """Lets at most `n_slots` trajectories be in flight.

    Example: with one slot, places taken with the urgencies (1, 0), (0, 0), (0, 0) while it is held are served
    second, third, first.

    Args:
        n_slots: slots that are free now.
        reuses: False when a slot is used once, and further ones are given by `add`.
    """

    def __init__(self, n_slots: int, *, reuses: bool = True) -> None:
        self._free, self._reuses = n_slots, reuses
        self._line: list[tuple[Urgency, int, Place]] = []
        self._numbers = itertools.count()

    @contextmanager
    def places(self, n: int, urgency: Urgency) -> Iterator[list[Place]]:
        """`n` places in line, taken at once; what is not over at the end is given up."""
        taken = [Place() for _ in range(n)]
        for place in taken:
            heapq.heappush(self._line, (urgency, next(self._numbers), place))
        self._grant()
        try:
            yield taken
        finally:
            for place in taken:
                self.leave(place)

    @asynccontextmanager
    async def slot(self, place: Place, until: float | None = None) -> AsyncIterator[None]:
        """The slot of a place, waited for, and given back at the end.

        Raises:
            TimeoutError: it was not granted until this moment of the event loop's clock, in seconds.
        """
        try:
            await place.turn(until)
            yield
        finally:
            self.leave(place)

    def leave(self, place: Place) -> None:
        """Give a place up, and its slot if it has one; once."""
        if place.is_over:
            return
        place.is_over = True
        if place.granted.done():
            self.add(int(self._reuses))
        else:
            place.granted.cancel()

    def add(self, n: int) -> None:
        """So many slots more are free."""
        self._free += n
        self._grant()

    def _grant(self) -> None:
        while self._free and self._line:
            _, _, place = heapq.heappop(self._line)
            if not place.is_over:
                self._free -= 1
                place.granted_ns = time.perf_counter_ns()
                place.granted.set_result(None)
