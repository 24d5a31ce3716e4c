"""When each rank came to each collective, and how long it waited there for the slowest rank.

Collectives are timed where the trainer calls them: `with times.collective(): dist.all_reduce(...)`. DeepSpeed's own are timed at
its calls: the reduction of gradients from the last gradient of a backward pass to the end of `backward`, the update from
begin to end. Every rank times the same collectives in the same order.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rollmill.tasks.observe.spans import LEAST_NS

Moment: TypeAlias = "int | torch.cuda.Event"
"""A value of `time.perf_counter_ns`; on a GPU an event in the order of what the device does."""

Visits: TypeAlias = npt.NDArray[np.int64]
"""[N, 2] nanoseconds since 1970, in the order of the collectives: when a rank came and when it left."""


class RankWaits(NamedTuple):
    """Times that a rank spent in collectives waiting for the slowest rank, in order.

    Attributes:
        started_ns: [N] begin of each wait, in nanoseconds since 1970.
        ended_ns: [N] end of each wait, in nanoseconds since 1970.
        slowest: [N] the rank that entered the collective last.
    """

    started_ns: npt.NDArray[np.int64]
    ended_ns: npt.NDArray[np.int64]
    slowest: npt.NDArray[np.int64]

    def take(self, which: npt.NDArray[np.bool_]) -> "RankWaits":
        """Return the waits for which the mask is True."""
        return RankWaits(self.started_ns[which], self.ended_ns[which], self.slowest[which])


class CollectiveTimes:
    """Records when this process entered and left each collective since `begin`; on a GPU by the device's clock.

    Put each collective in a `with times.collective():` block, and each backward pass that reduces gradients in
    `with times.reduction():`. `visits` returns what was recorded. A process has one object, `times`.
    """

    def __init__(self) -> None:
        self._visits: list[tuple[Moment, Moment]] = []
        self._anchor: tuple[Moment, int] = 0, 0
        self._last_gradient: Moment | None = None

    def begin(self) -> None:
        """Forget the collectives recorded so far.

        All ranks call it between the same two collectives, so that their lists of collectives match.
        """
        self._visits = []
        if torch.cuda.is_available():
            # With the device idle, the event's moment is the host's: later events are converted by their distance to it.
            torch.cuda.synchronize()
            self._anchor = self._now(), time.perf_counter_ns()

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Time a collective, or a call that begins and ends with one."""
        came = self._now()
        yield
        self._visits.append((came, self._now()))

    def watch_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Register hooks that record when each backward pass has computed its last gradient.

        Call it before DeepSpeed registers its own hooks, which communicate: hooks run in the order of registration.
        """
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note_gradient)

    @contextmanager
    def reduction(self) -> Iterator[None]:
        """Time the gradient reduction of the backward pass in the `with` block: from its last gradient to the block's end."""
        self._last_gradient = None
        yield
        left = self._now()
        self._visits.append((self._last_gradient or left, left))

    def visits(self, since_1970: Callable[[int], int]) -> Visits:
        """Return [N, 2] nanoseconds since 1970 at which this rank entered and left each collective since `begin`.

        Args:
            since_1970: converts a value of `time.perf_counter_ns`.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rows = [[since_1970(self._at(each)) for each in visit] for visit in self._visits]
        return np.array(rows, np.int64).reshape(-1, 2)

    def _note_gradient(self, _: torch.Tensor) -> None:
        # One event is recorded again and again: the last gradient of a pass counts.
        if isinstance(self._last_gradient, torch.cuda.Event):
            self._last_gradient.record()
        else:
            self._last_gradient = self._now()

    def _now(self) -> Moment:
        if not torch.cuda.is_available():
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _at(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment
        first, at = self._anchor
        return at + int(1e6 * first.elapsed_time(moment))  # type: ignore[union-attr]  # both are events then


times = CollectiveTimes()
"""Of this process, as its process group is."""


def clock_shifts(visits: Sequence[Visits], machines: Sequence[str]) -> list[int]:
    """Return [W] nanoseconds to add to each rank's times to get times of rank 0's clock; 0 for ranks on rank 0's machine.

    Ranks leave most collectives at the same moment, so the estimate is the median difference of these times.

    Args:
        visits: [W][N, 2] nanoseconds at which each rank entered and left each collective.
        machines: [W] id of each rank's machine.
    """
    n = min(map(len, visits))
    return [
        int(np.median(visits[0][:n, 1] - own[:n, 1])) if n and machine != machines[0] else 0
        for own, machine in zip(visits, machines, strict=True)
    ]


def find_waits(visits: Sequence[Visits]) -> list[RankWaits]:
    """Find each rank's wait in each collective: from its arrival until the slowest rank arrived, or until it left before.

    Waits shorter than `LEAST_NS` are left out.

    Args:
        visits: [W][N, 2] nanoseconds at which each rank entered and left each collective, by one clock.

    Returns:
        The waits of each rank, [W].

    Example: when rank 0 arrives at 1 s and rank 1 at 3 s, rank 0 waits 2 s for rank 1.
    """
    n = min(map(len, visits))
    came, left = np.moveaxis(np.stack([each[:n] for each in visits]), 2, 0)
    slowest = came.argmax(0)
    until = np.minimum(came.max(0), left)
    waits = (RankWaits(came[rank], until[rank], slowest) for rank in range(len(visits)))
    return [each.take(each.ended_ns - each.started_ns >= LEAST_NS) for each in waits]
