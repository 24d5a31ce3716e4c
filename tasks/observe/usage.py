"""Measure work on an event loop: seconds, CPU seconds, memory and lag."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollmill.tasks.observe.loop_lag import Beat, LoopLag
from rollmill.tasks.observe.process_memory import own_rss_bytes
from rollmill.tasks.observe.stack_sites import StallSampler

# The loop's thread is sampled once a beat is this late; beats are 1 ms apart.
SAMPLE_S = 0.003
KIB = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """Time, event loop lag and memory that some work used.

    Attributes:
        wall_s: wall-clock seconds.
        cpu_s: CPU seconds of all threads of this process.
        below_cpu_s: CPU seconds of its descendant processes.
        lag_p50_ms: median lag of the event loop, from beats 1 ms apart; NaN without a beat.
        lag_p99_ms: 99th percentile of the lag.
        lag_max_ms: largest lag.
        rss_peak_bytes: peak resident memory of this process.
        rss_growth_bytes: growth of its resident memory; may be negative.
        longest: stack site of the largest lag; empty if no lag was long enough to be sampled.
    """

    wall_s: float
    cpu_s: float
    below_cpu_s: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    rss_peak_bytes: int
    rss_growth_bytes: int
    longest: str


class UsageMeter:
    """Measures the time, event loop lag and memory of work on the running event loop.

    Args:
        apart: ids of descendant processes that do not count, with their own descendants.

    Attributes:
        usage: the result, once the work is done.

    Example: async with (meter := UsageMeter()).measure(): await work()
    """

    usage: Usage

    def __init__(self, apart: Collection[int] = ()) -> None:
        self._apart = apart
        self._lag = LoopLag(on_beat=self._on_beat)
        self._sampler = StallSampler(self._lag, SAMPLE_S)
        self._largest_ms, self._longest = 0.0, ""

    @asynccontextmanager
    async def measure(self) -> AsyncIterator[None]:
        """Measure the work inside; sets `usage` at the end, also if an error ends it."""
        below = await asyncio.to_thread(children_cpu_s, self._apart)
        _reset_peak_rss()
        rss = own_rss_bytes()
        started, cpu = time.perf_counter(), time.process_time()
        try:
            with self._lag.sample(), self._sampler.sample():
                yield
        finally:
            wall, spent = time.perf_counter() - started, time.process_time() - cpu
            # Before the next await: while it waits, other work could change the memory.
            peak, grown = _peak_rss_bytes(), own_rss_bytes() - rss
            lags = self._lag.lags
            self.usage = Usage(
                wall_s=wall,
                cpu_s=spent,
                below_cpu_s=max(0.0, await asyncio.to_thread(children_cpu_s, self._apart) - below),
                lag_p50_ms=lags.percentile_ms(50),
                lag_p99_ms=lags.percentile_ms(99),
                lag_max_ms=lags.largest_ms,
                rss_peak_bytes=peak,
                rss_growth_bytes=grown,
                longest=self._longest,
            )

    def _on_beat(self, beat: Beat) -> None:
        seen = self._sampler.take()
        if beat.lag_ms > self._largest_ms:
            self._largest_ms = beat.lag_ms
            self._longest = seen.most_common(1)[0][0] if seen else ""


def children_cpu_s(apart: Collection[int] = ()) -> float:
    """Return the CPU seconds of descendant processes, including those that ended and were waited for.

    `apart` are ids of processes to leave out, with their descendants; their time counts once they have ended.
    """
    here = psutil.Process()
    left_out = set(apart)
    total = sum(here.cpu_times()[2:4])
    # psutil lists parents before their children. A process may end at any time.
    for process in here.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid in left_out or process.ppid() in left_out:
                left_out.add(process.pid)
            else:
                total += sum(process.cpu_times()[:4])
    return float(total)


def _reset_peak_rss() -> None:
    # The kernel may refuse; then the peak since the process started is reported.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next((line for line in lines if line.startswith("VmHWM")), None)
    return int(found.split()[1]) * KIB if found else own_rss_bytes()
