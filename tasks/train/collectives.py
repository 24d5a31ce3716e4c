"""When each rank came to each collective, and how long it waited there for the slowest of the others.

torch's flight recorder knows when a collective was begun, not when a rank came to wait for its result, and on a GPU
neither of both in the device's time. So torch's functions, which DeepSpeed calls as we do, are watched.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tasks.observe.short_spans import LEAST_NS

WATCHED = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
Moment: TypeAlias = "int | torch.cuda.Event"
"""Of `time.perf_counter_ns`; or in the order of what a GPU does."""

Visits: TypeAlias = npt.NDArray[np.int64]
"""[N, 3] nanoseconds since 1970, in the order of the collectives: when a rank came, waited, and left."""


class Wait(NamedTuple):
    """A rank's wait for another one.

    Attributes:
        rank: that waited.
        started_ns: nanoseconds since 1970.
        ended_ns: likewise.
        slowest: the rank that came last.
    """

    rank: int
    started_ns: int
    ended_ns: int
    slowest: int


class Collectives:
    """Watches the collectives of this process.

    Args:
        device: where it computes; on a GPU moments are those at which the device comes to them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._visits: list[list[Moment]] = []
        self._anchor: tuple[Moment, int] = 0, 0

    def watch(self) -> None:
        """Watch from now on; before DeepSpeed is initialized, which keeps some of the functions."""
        for name in WATCHED:
            setattr(dist, name, self._watched(getattr(dist, name)))

    def begin(self) -> None:
        """Forget what was; every rank calls it between the same two collectives."""
        self._visits = []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._anchor = self._now(), time.perf_counter_ns()

    def visits(self, since_1970: Callable[[int], int]) -> Visits:
        """This rank's since `begin`; `since_1970` says when a moment of `time.perf_counter_ns` was."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # what was never waited for was left when it was begun
        rows = [[self._at(each) for each in (visit * 3)[:3]] for visit in self._visits]
        return np.array([[since_1970(each) for each in row] for row in rows], np.int64).reshape(-1, 3)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            visit = [self._now()]
            self._visits.append(visit)
            result = function(*args, **kwargs)
            if isinstance(result, dist.Work):
                return _Awaited(result, visit, self._now)
            visit += [visit[0], self._now()]
            return result

        return watched

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _at(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment
        first, at = self._anchor
        return at + int(1e6 * first.elapsed_time(moment))  # type: ignore[union-attr]  # both are events then


class _Awaited:
    """A collective under way, whose result is waited for later."""

    def __init__(self, work: dist.Work, visit: list[Moment], now: Callable[[], Moment]) -> None:
        self._work, self._visit, self._now = work, visit, now

    def wait(self, *args: Any) -> Any:
        """As torch's; the first call is the visit."""
        waited = self._now()
        result = self._work.wait(*args)
        if len(self._visit) == 1:
            self._visit += [waited, self._now()]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def clock_shifts(visits: Sequence[Visits], machines: Sequence[str]) -> list[int]:
    """[W] nanoseconds to add to each rank's times for those of rank 0; 0 on its machine.

    Ranks leave most collectives at the same moment: the median of the differences counts.
    """
    n = min(map(len, visits))
    return [
        int(np.median(visits[0][:n, 2] - own[:n, 2])) if n and machine != machines[0] else 0
        for own, machine in zip(visits, machines, strict=True)
    ]


def waits(visits: Sequence[Visits]) -> Iterator[Wait]:
    """Of each rank, in every collective, from when it waited until the slowest had come, or it left before.

    Args:
        visits: [W] of all ranks, by one clock.

    Example: when rank 0 comes, and waits, at 1 s and rank 1 at 3 s, rank 0 waits 2 s for rank 1.
    """
    n = min(map(len, visits))
    came, waited, left = np.moveaxis(np.stack([each[:n] for each in visits]), 2, 0)
    slowest = came.argmax(0)
    until = np.minimum(came.max(0), left)
    for rank, number in np.argwhere(until - waited >= LEAST_NS).tolist():
        yield Wait(rank, int(waited[rank, number]), int(until[rank, number]), int(slowest[number]))
