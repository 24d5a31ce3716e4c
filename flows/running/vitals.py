"""How the flow's process is: its event loop, its memory and that of what it started, by step."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from flows.running.memory_watch import MemoryWatch
from flows.ui.progress import say
from tasks.observe.config import ObserveConfig
from tasks.observe.loop import LoopMonitor
from tasks.observe.memory import (
    Holders,
    malloc_bytes,
    own_rss_bytes,
    release_to_system,
    rss_bytes_below,
    rss_bytes_by_kind,
)
from tasks.observe.metrics import Metric
from tasks.store.memory import arrow_bytes, release_arrow

DEFAULTS = ObserveConfig()


class Vitals:
    """Watches over the flow's process, from the opening of a run to its end.

    Args:
        config: the bounds.
        warn: tells people something.
        waiting: how much of what waits to be taken on, by name.
    """

    def __init__(
        self,
        config: ObserveConfig = DEFAULTS,
        warn: Callable[[str], None] = say,
        waiting: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._loop = LoopMonitor(config.max_stall_ms, config.max_lag_p99_ms, warn)
        self._memory = MemoryWatch(config.max_rss_growth, warn, lambda: Holders.now(arrow_bytes(), waiting()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside."""
        with self._loop.watching():
            yield

    async def of_step(self) -> list[Metric]:
        """What was measured since the last step; memory that it freed goes back to the system first."""
        release_arrow()  # here, in a millisecond: from another thread it leaves what this one freed
        sizes, below = await asyncio.to_thread(_released_and_measured)
        self._memory.see(sizes["flow_rss"])
        self._memory.see_below(below)
        memory = [Metric(f"memory/{name}_bytes", "all", "value", float(n)) for name, n in sizes.items()]
        return [*self._loop.report(), *memory]


def _released_and_measured() -> tuple[dict[str, int], Mapping[tuple[str, int], int]]:
    """Give back what is free, and say what is left, by name; and what each process below has."""
    release_to_system()
    used, free = malloc_bytes()
    below = rss_bytes_below()
    sizes = {"flow_rss": own_rss_bytes(), "arrow": arrow_bytes(), "malloc": used, "malloc_free": free}
    return sizes | {f"{kind}_rss": n for kind, n in sorted(rss_bytes_by_kind(below).items())}, below
