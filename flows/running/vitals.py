"""How the flow's process is: its event loop, its memory and that of what it started, by step."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flows.ui.progress import say
from tasks.observe.config import ObserveConfig
from tasks.observe.loop import LoopMonitor
from tasks.observe.memory import (
    MIB,
    Holders,
    malloc_bytes,
    own_rss_bytes,
    release_to_system,
    rss_bytes_by_kind,
)
from tasks.observe.metrics import Metric
from tasks.store.memory import arrow_bytes, release_arrow

SETTLED_AFTER = 5
"""Steps of this process after which its memory is what it needs: libraries are loaded and connections open."""


DEFAULTS = ObserveConfig()


class MemoryWatch:
    """Warns when a process has grown since it settled, and again whenever it has grown as much once more.

    Args:
        max_growth: share of the memory it had.
        holders: counts who holds it.
    """

    def __init__(
        self,
        max_growth: float,
        warn: Callable[[str], None],
        holders: Callable[[], Holders] = Holders.now,
    ) -> None:
        self._max_growth, self._warn, self._holders = max_growth, warn, holders
        self._n_steps = 0
        self._settled: Holders | None = None

    def see(self, rss_bytes: int) -> None:
        """Take in what the process has at the end of a step."""
        self._n_steps += 1
        if not self._max_growth or self._n_steps < SETTLED_AFTER:
            return
        before = self._settled
        if before is None:
            self._settled = self._holders()
        elif rss_bytes > before.rss_bytes * (1.0 + self._max_growth):
            now = self._settled = self._holders()
            self._warn(
                f"this process has grown from {before.rss_bytes / MIB:,.0f} to {rss_bytes / MIB:,.0f} MiB, more than "
                f"observe.max_rss_growth = {self._max_growth:g} allows: {now.grown_since(before)}, "
                f"Arrow has {arrow_bytes() / MIB:,.0f} MiB"
            )


class Vitals:
    """Watches over the flow's process, from the opening of a run to its end."""

    def __init__(self, config: ObserveConfig = DEFAULTS, warn: Callable[[str], None] = say) -> None:
        self._loop = LoopMonitor(config.max_stall_ms, config.max_lag_p99_ms, warn)
        self._memory = MemoryWatch(config.max_rss_growth, warn)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside."""
        with self._loop.watching():
            yield

    async def of_step(self) -> list[Metric]:
        """What was measured since the last step; memory that it freed goes back to the system first."""
        sizes = await asyncio.to_thread(_released_and_measured)
        self._memory.see(sizes["flow_rss"])
        memory = [Metric(f"memory/{name}_bytes", "all", "value", float(n)) for name, n in sizes.items()]
        return [*self._loop.report(), *memory]


def _released_and_measured() -> dict[str, int]:
    """Give back what is free, and say what is left, by name."""
    release_arrow()
    release_to_system()
    used, free = malloc_bytes()
    sizes = {"flow_rss": own_rss_bytes(), "arrow": arrow_bytes(), "malloc": used, "malloc_free": free}
    return sizes | {f"{kind}_rss": n_bytes for kind, n_bytes in sorted(rss_bytes_by_kind().items())}
