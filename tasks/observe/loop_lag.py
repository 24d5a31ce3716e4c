"""Measure how late an event loop runs its callbacks, and how much of that is waiting for a CPU."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np

# Interval for measurements of a few seconds.
SHORT_TICK_S = 0.001

# 400 buckets of 5 % from a microsecond on reach five minutes.
BUCKET_RATIO = 1.05
LEAST_MS = 0.001
N_BUCKETS = 400
STATS_BYTES = 128


class LagHistogram:
    """Histogram of lags in logarithmic buckets of 5 %; its memory does not grow.

    Attributes:
        n: number of lags added.
        largest_ms: the largest lag, exact.
    """

    def __init__(self) -> None:
        self.n, self.largest_ms = 0, 0.0
        self._counts = np.zeros(N_BUCKETS, np.int64)

    def add(self, lag_ms: float, tick_ms: float = math.inf) -> None:
        """Add a lag of `lag_ms` and, for each beat missed during it, a lag that is shorter by another `tick_ms`.

        Example: a loop that is blocked for 30 ms with a beat every 10 ms adds lags of 30, 20 and 10 ms.
        """
        self.largest_ms = max(self.largest_ms, lag_ms)
        # The common case, 100 times a second, without arrays.
        if lag_ms <= tick_ms:
            self._counts[_bucket_index(lag_ms)] += 1
            self.n += 1
            return
        late_ms = np.arange(lag_ms, 0.0, -tick_ms)
        buckets = np.log(np.maximum(late_ms, LEAST_MS) / LEAST_MS) / math.log(BUCKET_RATIO)
        np.add.at(self._counts, np.minimum(buckets.astype(np.int64), N_BUCKETS - 1), 1)
        self.n += len(late_ms)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the lags in ms, accurate to 5 %; NaN without lags."""
        if not self.n:
            return math.nan
        bucket = int(np.searchsorted(np.cumsum(self._counts), math.ceil(self.n * percent / 100.0)))
        return min(self.largest_ms, LEAST_MS * BUCKET_RATIO ** (bucket + 1))


def _bucket_index(lag_ms: float) -> int:
    return min(int(math.log(max(lag_ms, LEAST_MS) / LEAST_MS) / math.log(BUCKET_RATIO)), N_BUCKETS - 1)


@dataclass(frozen=True, slots=True)
class Beat:
    """One beat of an event loop, which is a timer callback, and what delayed it.

    Attributes:
        lag_ms: delay of the callback after the time it was due.
        running_ms: CPU time of the loop's thread since the previous beat.
        queued_ms: time since the previous beat in which the thread was runnable but had no CPU.
        blocked_ms: time in which the thread waited in a call while other threads could run, as far as it was sampled.
    """

    lag_ms: float
    running_ms: float
    queued_ms: float
    blocked_ms: float = 0.0

    def __add__(self, other: "Beat") -> "Beat":
        """Add two beats field by field."""
        return Beat(
            self.lag_ms + other.lag_ms,
            self.running_ms + other.running_ms,
            self.queued_ms + other.queued_ms,
            self.blocked_ms + other.blocked_ms,
        )

    @property
    def waiting_ms(self) -> float:
        """Part of the lag in ms that is neither running, queued nor blocked: mostly waiting for the GIL."""
        return max(0.0, self.lag_ms - self.running_ms - self.queued_ms - self.blocked_ms)

    @property
    def is_queued(self) -> bool:
        """True if the thread waited for a CPU during most of the lag."""
        return 2.0 * self.queued_ms > self.lag_ms

    @property
    def is_blocked(self) -> bool:
        """True if the thread was blocked in a call during most of the lag."""
        return 2.0 * self.blocked_ms > self.lag_ms

    def with_blocked(self, n_looks: int, every_s: float) -> "Beat":
        """Return the beat with its waiting time as `blocked_ms` if the watchdog thread could run during most of the lag.

        Then the event loop's thread waited in a call that had released the GIL.

        Args:
            n_looks: how often the watchdog looked at the thread during the lag.
            every_s: seconds between two looks.

        Example: a lag of 700 ms with 13 looks, one each 0.05 s, was a blocking call. With 2 looks another thread held
            the GIL, which kept the watchdog out as well.
        """
        is_free = 2000.0 * every_s * n_looks > self.lag_ms
        # Zero means that the kernel does not report CPU times.
        is_counted = self.running_ms > 0.0
        return replace(self, blocked_ms=self.waiting_ms) if is_free and is_counted else self


class LoopLag:
    """Schedules a beat on the running event loop every `tick_s` and measures its lag; `on_beat` is called on the loop at each.

    Attributes:
        lags: histogram of all beats so far; may be replaced by an empty one at any time.
        largest: the beat with the largest lag.
        due_s: time the next beat is due, as `time.monotonic`.
    """

    def __init__(self, tick_s: float = SHORT_TICK_S, on_beat: Callable[[Beat], None] | None = None) -> None:
        self.lags = LagHistogram()
        self.largest = Beat(0.0, 0.0, 0.0)
        self.due_s = math.inf
        self._tick_s, self._on_beat = tick_s, on_beat

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Measure the lag of the running event loop inside the `with` block; enter it in the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._stats = _open_thread_stats()
        self._ran_ms, self._queued_ms = self._scheduling_ms()
        self._arm()
        try:
            yield
        finally:
            self._next.cancel()
            # No beat is due any more: a sampler that still runs must not take the silence for a stall.
            self.due_s = math.inf
            if self._stats is not None:
                os.close(self._stats)

    def _arm(self) -> None:
        self.due_s = time.monotonic() + self._tick_s
        self._next = self._loop.call_later(self._tick_s, self._beat)

    def _beat(self) -> None:
        # A timer may fire a clock tick early.
        lag_ms = 1000.0 * max(0.0, time.monotonic() - self.due_s)
        ran_ms, queued_ms = self._scheduling_ms()
        beat = Beat(lag_ms, ran_ms - self._ran_ms, queued_ms - self._queued_ms)
        self._ran_ms, self._queued_ms = ran_ms, queued_ms
        self.lags.add(lag_ms, 1000.0 * self._tick_s)
        if lag_ms > self.largest.lag_ms:
            self.largest = beat
        if self._on_beat is not None:
            self._on_beat(beat)
        self._arm()

    def _scheduling_ms(self) -> tuple[float, float]:
        """Return the thread's CPU time and its time in the run queue, in ms; zeros if the kernel does not report them."""
        if self._stats is None:
            return 0.0, 0.0
        ran_ns, queued_ns, _ = os.pread(self._stats, STATS_BYTES, 0).split()
        return int(ran_ns) / 1e6, int(queued_ns) / 1e6


def _open_thread_stats() -> int | None:
    # The kernel of a sandbox may not have the file.
    with suppress(OSError):
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    return None
