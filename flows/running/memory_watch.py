"""Warns of processes whose memory grows: the flow's own, and those that it launched."""

from collections.abc import Callable, Mapping

from tasks.observe.memory import MIB, Holders

SETTLED_AFTER = 5
"""Steps of a process after which its memory is what it needs: libraries are loaded and connections open."""

LEAST_BYTES = 64 * MIB
"""What a launched process grows by at least to be told of: small ones double with nothing."""

WHAT_TO_LOOK_AT = {
    "trainer": "the tokens of its batches and micro-batches (train.micro_batch_tokens), and its log",
    "servers": "the requests in flight and their lengths (rollout.max_in_flight, serve.max_model_len), and its log",
    "environment": "what the environment keeps from one episode to the next",
    "scoring": "what the scorer keeps from one call to the next",
    "sinks": "whether TensorBoard, MLflow and the OpenTelemetry receiver take what they are told",
}
"""Of what the flow launches, by what it is."""


class Growth:
    """Notices that a process has grown since it settled, and again whenever it has grown as much once more.

    Args:
        max_growth: share of the memory that it had; 0: notices nothing.
        least_bytes: that it must have grown by besides.
    """

    def __init__(self, max_growth: float, least_bytes: int = 0) -> None:
        self._max_growth, self._least_bytes = max_growth, least_bytes
        self._n_steps, self._settled_bytes = 0, 0

    @property
    def is_settled(self) -> bool:
        """True from the step on that what comes later is measured against."""
        return self._n_steps >= SETTLED_AFTER

    def since(self, rss_bytes: int) -> int:
        """Take in what the process has at the end of a step; returns what it had before it grew, 0 where it has not."""
        self._n_steps += 1
        before = self._settled_bytes
        if not self._max_growth or not self.is_settled:
            return 0
        if before and rss_bytes <= max(before * (1.0 + self._max_growth), before + self._least_bytes):
            return 0
        self._settled_bytes = rss_bytes
        return before


class MemoryWatch:
    """Warns when this process, or one that it launched, has grown since it settled, and whenever it has as much once more.

    Args:
        max_growth: share of the memory it had; 0: never.
        warn: tells people.
        holders: counts who holds this process's.
    """

    def __init__(
        self, max_growth: float, warn: Callable[[str], None], holders: Callable[[], Holders] = Holders.now
    ) -> None:
        self._max_growth, self._warn, self._holders = max_growth, warn, holders
        self._own, self._below = Growth(max_growth), dict[tuple[str, int], Growth]()
        self._settled: Holders | None = None

    def see(self, rss_bytes: int) -> None:
        """Take in what this process has at the end of a step."""
        before_bytes, before = self._own.since(rss_bytes), self._settled
        if self._max_growth and self._own.is_settled and (before is None or before_bytes):
            now = self._settled = self._holders()
            if before is not None:
                grown = self._grown("this process", before_bytes, rss_bytes)
                self._warn(f"{grown}: {now.grown_since(before)}")

    def see_below(self, rss_bytes: Mapping[tuple[str, int], int]) -> None:
        """Take in what each process that was launched has, by what it is and its id."""
        for process, n_bytes in rss_bytes.items():
            growth = self._below.get(process) or Growth(self._max_growth, LEAST_BYTES)
            self._below[process] = growth
            if before_bytes := growth.since(n_bytes):
                kind, pid = process
                grown = self._grown(f"process {pid} ({kind})", before_bytes, n_bytes)
                self._warn(f"{grown}; look at {WHAT_TO_LOOK_AT[kind]}")
        self._below = {process: self._below[process] for process in rss_bytes}

    def _grown(self, who: str, before_bytes: int, now_bytes: int) -> str:
        return (
            f"{who} has grown from {before_bytes / MIB:,.0f} to {now_bytes / MIB:,.0f} MiB, more than "
            f"observe.max_rss_growth = {self._max_growth:g} allows"
        )
