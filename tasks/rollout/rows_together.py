"""Rows of trajectories that end together, made and handed over together."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from tasks.rollout.trajectory import Trajectory
from tasks.store.rows import Rows

Keep: TypeAlias = Callable[[Rows], Awaitable[None]]
"""Hands rows to the run's writer; what it returns is done when they are acknowledged."""

Kept: TypeAlias = tuple[Rows, Awaitable[None]]
"""A row that was handed over, and what is done when it is acknowledged."""


class RowsTogether:
    """Hands over the rows of all trajectories that end in one turn of the event loop at once.

    Making one row takes Arrow about as long as making ten. No row comes later by it than in the next turn.

    Args:
        make: gives the rows of trajectories, one each.
        keep: hands rows to the run's writer.
    """

    def __init__(self, make: Callable[[Sequence[Trajectory]], Rows], keep: Keep) -> None:
        self._make, self._keep = make, keep
        self._ended: list[tuple[Trajectory, asyncio.Future[Kept]]] = []

    async def row_of(self, trajectory: Trajectory) -> Kept:
        """Hand a trajectory's row over; returns the row, and what is done when it is acknowledged.

        It is handed over as well when the task that waits for it is cancelled.
        """
        loop = asyncio.get_running_loop()
        if not self._ended:
            loop.call_soon(self._hand_over)
        kept: asyncio.Future[Kept] = loop.create_future()
        self._ended.append((trajectory, kept))
        return await kept

    def _hand_over(self) -> None:
        ended, self._ended = self._ended, []
        waiting = [(place, kept) for place, (_, kept) in enumerate(ended) if not kept.cancelled()]
        try:
            rows = self._make([trajectory for trajectory, _ in ended])
            acknowledged = asyncio.ensure_future(self._keep(rows))
        except Exception as error:  # noqa: BLE001 - it must reach who waits for these rows
            for _, kept in waiting:
                kept.set_exception(error)
            return
        for place, kept in waiting:
            kept.set_result((rows.slice(place, 1), acknowledged))
