"""How late an event loop is, and how much of that is for want of a processor."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np

SHORT_TICK_S = 0.001
"""What a benchmark samples at, for a few seconds."""

BUCKET_RATIO = 1.05
LEAST_MS = 0.001
N_BUCKETS = 400
STATS_BYTES = 128


class LagHistogram:
    """Lags by size, in buckets of which each ends 5 % above the one before: of fixed memory, however many there are.

    Attributes:
        n: how many lags were added.
        largest_ms: exactly.
    """

    def __init__(self) -> None:
        self.n, self.largest_ms = 0, 0.0
        self._counts = np.zeros(N_BUCKETS, np.int64)

    def add(self, lag_ms: float, tick_ms: float = math.inf) -> None:
        """Count a lag, and with it the beats that were missed meanwhile.

        Example: a loop that stood still for 30 ms with a beat due every 10 ms is late by 30, 20 and 10 ms.
        """
        self.largest_ms = max(self.largest_ms, lag_ms)
        if lag_ms <= tick_ms:
            self._counts[_bucket(lag_ms)] += 1
            self.n += 1
            return
        late_ms = np.arange(lag_ms, 0.0, -tick_ms)
        buckets = np.log(np.maximum(late_ms, LEAST_MS) / LEAST_MS) / math.log(BUCKET_RATIO)
        np.add.at(self._counts, np.minimum(buckets.astype(np.int64), N_BUCKETS - 1), 1)
        self.n += len(late_ms)

    def percentile_ms(self, percent: float) -> float:
        """What so many percent of the lags are not above, within 5 %; NaN without lags."""
        if not self.n:
            return math.nan
        bucket = int(np.searchsorted(np.cumsum(self._counts), math.ceil(self.n * percent / 100.0)))
        return min(self.largest_ms, LEAST_MS * BUCKET_RATIO ** (bucket + 1))


def _bucket(lag_ms: float) -> int:
    return min(int(math.log(max(lag_ms, LEAST_MS) / LEAST_MS) / math.log(BUCKET_RATIO)), N_BUCKETS - 1)


@dataclass(frozen=True, slots=True)
class Beat:
    """One beat of a loop.

    Attributes:
        lag_ms: how much later than due it came.
        running_ms: how long the loop's thread ran since the beat before.
        queued_ms: how long since then it could run and no processor took it: others had them all.
        blocked_ms: how long it waited in a call while other threads could run, as far as somebody looked.
    """

    lag_ms: float
    running_ms: float
    queued_ms: float
    blocked_ms: float = 0.0

    def __add__(self, other: "Beat") -> "Beat":
        """Both, one after the other."""
        return Beat(
            self.lag_ms + other.lag_ms,
            self.running_ms + other.running_ms,
            self.queued_ms + other.queued_ms,
            self.blocked_ms + other.blocked_ms,
        )

    @property
    def waiting_ms(self) -> float:
        """What is left of the lag: waiting for what is not known, the interpreter's lock above all."""
        return max(0.0, self.lag_ms - self.running_ms - self.queued_ms - self.blocked_ms)

    @property
    def is_queued(self) -> bool:
        """True when most of the lag was for want of a processor."""
        return 2.0 * self.queued_ms > self.lag_ms

    @property
    def is_blocked(self) -> bool:
        """True when most of the lag was spent in a call that does not compute."""
        return 2.0 * self.blocked_ms > self.lag_ms

    def looked_at(self, n_looks: int, every_s: float) -> "Beat":
        """The beat with its waiting laid to a call, where another thread could look every so often meanwhile.

        Who waits for the interpreter's lock waits beside all other threads, the one that looks among them.

        Example: 700 ms that were looked at 13 times, every 0.05 s, were spent in a call that waits; of 700 ms that were
            looked at twice, another thread had the interpreter.
        """
        is_free = 2000.0 * every_s * n_looks > self.lag_ms
        is_counted = self.running_ms > 0.0  # else the kernel does not say what was spent running
        return replace(self, blocked_ms=self.waiting_ms) if is_free and is_counted else self


class LoopLag:
    """Has a beat on the running event loop every tick, and counts by how much each is late.

    Args:
        tick_s: seconds from one beat to the next.
        heard: called on the loop at every beat, before the next is due.

    Attributes:
        lags: of all beats so far; may be replaced by an empty one at any time.
        largest: the latest beat.
        due_s: when the next beat is due, in seconds of `time.monotonic`.
    """

    def __init__(self, tick_s: float = SHORT_TICK_S, heard: Callable[[Beat], None] | None = None) -> None:
        self.lags = LagHistogram()
        self.largest = Beat(0.0, 0.0, 0.0)
        self.due_s = math.inf
        self._tick_s, self._heard = tick_s, heard

    @property
    def largest_ms(self) -> float:
        """The largest lag, in ms."""
        return self.largest.lag_ms

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample the running loop, in whose thread this is entered."""
        self._loop = asyncio.get_running_loop()
        self._stats = _scheduling_of_this_thread()
        self._ran_ms, self._queued_ms = self._scheduling_ms()
        self._arm()
        try:
            yield
        finally:
            self._next.cancel()
            self.due_s = math.inf
            if self._stats is not None:
                os.close(self._stats)

    def _arm(self) -> None:
        self.due_s = time.monotonic() + self._tick_s
        self._next = self._loop.call_later(self._tick_s, self._beat)

    def _beat(self) -> None:
        lag_ms = 1000.0 * max(0.0, time.monotonic() - self.due_s)
        ran_ms, queued_ms = self._scheduling_ms()
        beat = Beat(lag_ms, ran_ms - self._ran_ms, queued_ms - self._queued_ms)
        self._ran_ms, self._queued_ms = ran_ms, queued_ms
        self.lags.add(lag_ms, 1000.0 * self._tick_s)
        if lag_ms > self.largest.lag_ms:
            self.largest = beat
        if self._heard is not None:
            self._heard(beat)
        self._arm()

    def _scheduling_ms(self) -> tuple[float, float]:
        """How long the loop's thread has run, and has waited for a processor; zeros where the kernel does not say."""
        if self._stats is None:
            return 0.0, 0.0
        ran_ns, queued_ns, _ = os.pread(self._stats, STATS_BYTES, 0).split()
        return int(ran_ns) / 1e6, int(queued_ns) / 1e6


def _scheduling_of_this_thread() -> int | None:
    with suppress(OSError):  # a sandbox's kernel may not count it
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    return None


async def idle_lag_ms(seconds: float) -> float:
    """The largest lag of a loop that does nothing else."""
    lag = LoopLag()
    with lag.sampled():
        await asyncio.sleep(seconds)
    return lag.largest_ms
