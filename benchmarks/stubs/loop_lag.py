"""How late an event loop is, and how much of that is for want of a processor."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.001
STATS_BYTES = 128


class LoopLag:
    """The largest lag, in ms, of sleeps of 1 ms that end later than asked.

    Attributes:
        largest_ms: the lag.
        queued_ms: of it, how long the loop's thread could run and no processor took it: others had them all.
        running_ms: of it, how long the loop's thread ran. The rest is waiting, for the interpreter's lock above all.
    """

    def __init__(self) -> None:
        self.largest_ms = self.queued_ms = self.running_ms = 0.0

    @contextmanager
    def sampled(self) -> Iterator[None]:
        sampling = asyncio.ensure_future(self._sample())
        try:
            yield
        finally:
            sampling.cancel()

    async def _sample(self) -> None:
        stats = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        try:
            before = _ran_and_queued_ms(stats)
            while True:
                asked = time.perf_counter()
                await asyncio.sleep(TICK_S)
                lag_ms = 1000 * (time.perf_counter() - asked - TICK_S)
                after = _ran_and_queued_ms(stats)
                if lag_ms > self.largest_ms:
                    self.largest_ms = lag_ms
                    self.running_ms, self.queued_ms = after[0] - before[0], after[1] - before[1]
                before = after
        finally:
            os.close(stats)


def _ran_and_queued_ms(stats: int) -> tuple[float, float]:
    ran_ns, queued_ns, _ = os.pread(stats, STATS_BYTES, 0).split()
    return int(ran_ns) / 1e6, int(queued_ns) / 1e6


async def idle_lag_ms(seconds: float) -> float:
    """The largest lag of a loop that does nothing else."""
    lag = LoopLag()
    with lag.sampled():
        await asyncio.sleep(seconds)
    return lag.largest_ms
