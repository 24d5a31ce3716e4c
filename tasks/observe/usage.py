"""What a piece of work takes: seconds, processors, memory, and how late the event loop is meanwhile."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasks.observe.lag import Beat, LoopLag
from tasks.observe.memory import own_rss_bytes
from tasks.observe.standing import where_it_stands

LOOK_AFTER_S = 0.003
"""A beat of 1 ms that is so late has the loop's thread looked at, until it comes."""
KIB = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """What a piece of work took.

    Attributes:
        wall_s: seconds of the clock.
        cpu_s: CPU seconds of all threads of this process.
        below_cpu_s: CPU seconds of the processes below it.
        lag_p50_ms: how much later than asked a beat each 1 ms came on the event loop, in the median; NaN without a beat.
        rss_peak_bytes: the most resident memory of this process meanwhile.
        rss_growth_bytes: how much more is resident than before; negative when it is less.
        longest: what held the loop when a beat was latest; empty when none was late enough to be looked at.
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


class Measuring:
    """Measures work on the running event loop.

    Args:
        apart: ids of processes below this one that do not count, with all below them.

    Attributes:
        usage: what the work took, once it is over.

    Example: async with (measuring := Measuring()).measured(): await work()
    """

    usage: Usage

    def __init__(self, apart: Collection[int] = ()) -> None:
        self._apart = apart
        self._lag = LoopLag(heard=self._heard)
        self._has_ended = threading.Event()
        self._seen: Counter[str] = Counter()
        self._latest_ms, self._longest = 0.0, ""

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure what is done inside; `usage` is there afterwards, also when an error ended it."""
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        watchdog = threading.Thread(target=self._watch, args=(loop, thread_id), daemon=True)
        below = await asyncio.to_thread(below_cpu_s, self._apart)
        _forget_peak()
        rss = own_rss_bytes()
        started, cpu = time.perf_counter(), time.process_time()
        try:
            with self._lag.sampled():
                watchdog.start()
                yield
        finally:
            self._has_ended.set()
            wall, spent = time.perf_counter() - started, time.process_time() - cpu
            peak, grown = _peak_bytes(), own_rss_bytes() - rss
            lags = self._lag.lags
            self.usage = Usage(
                wall_s=wall,
                cpu_s=spent,
                below_cpu_s=max(0.0, await asyncio.to_thread(below_cpu_s, self._apart) - below),
                lag_p50_ms=lags.percentile_ms(50),
                lag_p99_ms=lags.percentile_ms(99),
                lag_max_ms=lags.largest_ms,
                rss_peak_bytes=peak,
                rss_growth_bytes=grown,
                longest=self._longest,
            )

    def _heard(self, beat: Beat) -> None:
        seen, self._seen = self._seen, Counter()
        if beat.lag_ms > self._latest_ms:
            self._latest_ms = beat.lag_ms
            self._longest = seen.most_common(1)[0][0] if seen else ""

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        """The watchdog's thread: a loop that stands still tells nobody, so that this is a matter of looking."""
        while not self._has_ended.wait(LOOK_AFTER_S):
            if time.monotonic() - self._lag.due_s >= LOOK_AFTER_S:
                self._seen[where_it_stands(loop, thread_id)] += 1


def below_cpu_s(apart: Collection[int] = ()) -> float:
    """CPU seconds of the processes below this one, those that have ended and were waited for included.

    `apart` are processes that are left out, with all below them; what they took counts once they have ended.
    """
    here = psutil.Process()
    left_out = set(apart)
    total = sum(here.cpu_times()[2:4])
    for process in here.children(recursive=True):  # each after the one that started it
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if process.pid in left_out or process.ppid() in left_out:
                left_out.add(process.pid)
            else:
                total += sum(process.cpu_times()[:4])
    return float(total)


def _forget_peak() -> None:
    """Count the peak of resident memory anew; where the kernel does not allow it, it is that since the start."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next((line for line in lines if line.startswith("VmHWM")), None)
    return int(found.split()[1]) * KIB if found else own_rss_bytes()
