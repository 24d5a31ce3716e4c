"""How late an event loop is."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.001


class LoopLag:
    """The largest lag, in ms, of sleeps of 1 ms that end later than asked."""

    def __init__(self) -> None:
        self.largest_ms = 0.0

    @contextmanager
    def sampled(self) -> Iterator[None]:
        sampling = asyncio.ensure_future(self._sample())
        try:
            yield
        finally:
            sampling.cancel()

    async def _sample(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.largest_ms = max(self.largest_ms, 1000 * (time.perf_counter() - asked - TICK_S))


async def idle_lag_ms(seconds: float) -> float:
    """The largest lag of a loop that does nothing else."""
    lag = LoopLag()
    with lag.sampled():
        await asyncio.sleep(seconds)
    return lag.largest_ms
