"""Admission control: a fixed number of slots for trajectories, granted by urgency, then by order of arrival."""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

from rollmill.tasks.observe.spans import span

Urgency: TypeAlias = tuple[int, int]
"""Smaller ones come first: (step, kind of work)."""

SLOT = "slot"
"""Cause of a wait: as many trajectories are in flight as may be."""

ROLLOUT, EVALUATION = 0, 1
"""Kinds of work of one step: its rollouts come before the evaluation of its policy version."""


class SlotTicket:
    """A request for one of the slots that limit how many trajectories run at once.

    Attributes:
        granted: done when the slot is granted.
        granted_ns: time when the slot was granted, as `time.perf_counter_ns`; 0 before.
        is_over: True once the slot was released, or the request withdrawn.
    """

    def __init__(self) -> None:
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False
        self.granted_ns = 0

    async def wait(self, until: float | None = None) -> None:
        """Wait until the requested slot is granted.

        Raises:
            TimeoutError: it was not granted by `until`, a time of the event loop's clock in seconds.
        """
        if not self.granted.done():
            with span("waiting_for_server", cause=SLOT):
                async with asyncio.timeout_at(until):
                    # If the slot is granted at this moment, the ticket must keep it until `release`; the future is not cancelled.
                    await asyncio.shield(self.granted)


class Admission:
    """Lets at most `n_slots` trajectories run at once; the request with the smallest urgency is granted first.

    Example: one slot is held, and requests arrive with the urgencies (1, 0), (0, 0), (0, 0): they are granted in the order
    second, third, first.
    """

    def __init__(self, n_slots: int) -> None:
        self._free = n_slots
        self._waiting: list[tuple[Urgency, int, SlotTicket]] = []
        # Breaks ties by arrival; without it the heap would compare tickets, which have no order.
        self._numbers = itertools.count()

    @contextmanager
    def request_slots(self, n: int, urgency: Urgency) -> Iterator[list[SlotTicket]]:
        """Request `n` slots at once; requests that are still open at the end of the context are withdrawn."""
        tickets = [SlotTicket() for _ in range(n)]
        for ticket in tickets:
            heapq.heappush(self._waiting, (urgency, next(self._numbers), ticket))
        self._grant()
        try:
            yield tickets
        finally:
            for ticket in tickets:
                self.release(ticket)

    @asynccontextmanager
    async def slot(self, ticket: SlotTicket, until: float | None = None) -> AsyncIterator[None]:
        """Wait for the slot of a ticket, and release it at the end of the context.

        Raises:
            TimeoutError: it was not granted by `until`, a time of the event loop's clock in seconds.
        """
        try:
            await ticket.wait(until)
            yield
        finally:
            self.release(ticket)

    def release(self, ticket: SlotTicket) -> None:
        """Withdraw a request and release its slot if it has one; further calls do nothing."""
        if ticket.is_over:
            return
        ticket.is_over = True
        if ticket.granted.done():
            self._free += 1
            self._grant()
        else:
            ticket.granted.cancel()

    def _grant(self) -> None:
        while self._free and self._waiting:
            _, _, ticket = heapq.heappop(self._waiting)
            # A withdrawn request stays in the heap until it is popped: to remove it would take linear time.
            if not ticket.is_over:
                self._free -= 1
                ticket.granted_ns = time.perf_counter_ns()
                ticket.granted.set_result(None)
