"""The flow process by step: event loop lag, its memory and that of the processes it started, with warnings when memory grows."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.observe.loop_monitor import LoopMonitor
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.process_memory import (
    MIB,
    Holders,
    malloc_bytes,
    own_rss_bytes,
    release_to_system,
    rss_bytes_below,
    rss_bytes_by_kind,
)
from rollmill.tasks.observe.step_clock import current_recorder
from rollmill.tasks.store.rows import arrow_bytes, release_arrow

# Steps after which a process has its working memory: libraries are loaded, connections are open.
SETTLED_AFTER = 5

# Least growth of a launched process that is reported: small processes double for no reason.
LEAST_BYTES = 64 * MIB

# Advice for each kind of process that the flow launches.
WHAT_TO_LOOK_AT = {
    "trainer": "the tokens of its batches and micro-batches (train.micro_batch_tokens), and its log",
    "servers": "the requests in flight and their lengths (rollout.max_in_flight, serve.max_model_len), and its log",
    "environment": "what the environment keeps between episodes",
    "scoring": "what the scorer keeps between calls",
    "sinks": "whether TensorBoard, MLflow and the OpenTelemetry receiver accept what is sent",
}


class Growth:
    """Detects that a process's memory has grown by more than a share since its first steps.

    After each detection the new size is what later sizes are compared with.

    Args:
        max_growth: allowed growth, as a share of the settled memory; 0: detects nothing.
        least_bytes: growth below this is ignored.
    """

    def __init__(self, max_growth: float, least_bytes: int = 0) -> None:
        self._max_growth, self._least_bytes = max_growth, least_bytes
        self._n_steps, self._settled_bytes = 0, 0

    @property
    def is_settled(self) -> bool:
        """True once SETTLED_AFTER steps are recorded; growth is measured from the memory at the last of these."""
        return self._n_steps >= SETTLED_AFTER

    def record(self, rss_bytes: int) -> int:
        """Record the resident bytes at a step's end; return the earlier size if they exceed the allowed growth, else 0."""
        self._n_steps += 1
        before = self._settled_bytes
        if not self._max_growth or not self.is_settled:
            return 0
        if before and rss_bytes <= max(before * (1.0 + self._max_growth), before + self._least_bytes):
            return 0
        self._settled_bytes = rss_bytes
        return before


class MemoryWatch:
    """Warns when this process, or one that it launched, uses much more memory than after its first steps.

    Args:
        max_growth: allowed growth, as a share of the settled memory; 0: never warns.
        warn: prints a warning.
        holders: counts what holds this process's memory.
    """

    def __init__(
        self, max_growth: float, warn: Callable[[str], None], holders: Callable[[], Holders] = Holders.now
    ) -> None:
        self._max_growth, self._warn, self._holders = max_growth, warn, holders
        self._own, self._below = Growth(max_growth), dict[tuple[str, int], Growth]()
        self._settled: Holders | None = None

    def record(self, rss_bytes: int) -> None:
        """Record this process's resident bytes at the end of a step; warn if they have grown too much."""
        before_bytes, before = self._own.record(rss_bytes), self._settled
        if self._max_growth and self._own.is_settled and (before is None or before_bytes):
            now = self._settled = self._holders()
            if before is not None:
                grown = self._grown("this process", before_bytes, rss_bytes)
                self._warn(f"{grown}: {now.grown_since(before)}")

    def record_children(self, rss_bytes: Mapping[tuple[str, int], int]) -> None:
        """Record the resident bytes of launched processes, by kind and process id; warn of each that has grown too much."""
        for process, n_bytes in rss_bytes.items():
            growth = self._below.get(process) or Growth(self._max_growth, LEAST_BYTES)
            self._below[process] = growth
            if before_bytes := growth.record(n_bytes):
                kind, pid = process
                grown = self._grown(f"process {pid} ({kind})", before_bytes, n_bytes)
                self._warn(f"{grown}; look at {WHAT_TO_LOOK_AT[kind]}")
        # A process id may be given to another process later.
        self._below = {process: self._below[process] for process in rss_bytes}

    def _grown(self, who: str, before_bytes: int, now_bytes: int) -> str:
        return (
            f"{who} has grown from {before_bytes / MIB:,.0f} to {now_bytes / MIB:,.0f} MiB, more than "
            f"the limit of {self._max_growth:.0%}"
        )


class Vitals:
    """Measures the lag of the flow's event loop, and the memory of its process and of those that it launched.

    A limit of 0 switches its warning off.

    Args:
        warn: prints a warning.
        waiting: counts what waits in queues, by name.
        diagnostics: True to name the code that stalls the loop and the types of the objects that grow.
        max_stall_ms: milliseconds that the event loop may be blocked: half a second delays every server.
        max_lag_p99_ms: 99th percentile of the event loop's lag in a step, in milliseconds.
        max_rss_growth: share by which a process may grow once its first steps are done.
    """

    def __init__(
        self,
        warn: Callable[[str], None] = say,
        waiting: Callable[[], Mapping[str, int]] = dict,
        *,
        diagnostics: bool = False,
        max_stall_ms: float = 500.0,
        max_lag_p99_ms: float = 250.0,
        max_rss_growth: float = 0.25,
    ) -> None:
        self._loop = LoopMonitor(
            max_stall_ms,
            max_lag_p99_ms,
            warn,
            get_phase=lambda: current_recorder().step_does,
            samples_stacks=diagnostics,
        )

        def measure_holders() -> Holders:
            return Holders.now(arrow_bytes(), waiting(), counts_objects=diagnostics)

        self._memory = MemoryWatch(max_rss_growth, warn, measure_holders)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Measure the running event loop's lag inside the `with` block and warn of stalls; enter it in the loop's thread."""
        with self._loop.watch():
            yield

    async def measure_step(self) -> list[Metric]:
        """Return freed memory to the system, then the metrics of event loop lag and memory since the last call."""
        # On this thread: from another one it would leave what this one freed. It takes a millisecond.
        release_arrow()
        sizes, below = await asyncio.to_thread(_release_and_measure)
        self._memory.record(sizes["flow_rss"])
        self._memory.record_children(below)
        memory = [Metric(f"memory/{name}_bytes", "all", "value", float(n)) for name, n in sizes.items()]
        return [*self._loop.report(), *memory]


def _release_and_measure() -> tuple[dict[str, int], Mapping[tuple[str, int], int]]:
    """Return free memory to the system; return resident and allocator bytes by name, and each launched process's bytes."""
    release_to_system()
    used, free = malloc_bytes()
    below = rss_bytes_below()
    sizes = {"flow_rss": own_rss_bytes(), "arrow": arrow_bytes(), "malloc": used, "malloc_free": free}
    return sizes | {f"{kind}_rss": n for kind, n in sorted(rss_bytes_by_kind(below).items())}, below
