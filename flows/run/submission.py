"""The time from a decision to when processes act on it."""

import time

from rollmill.tasks.observe.metrics import ALL, Metric
from rollmill.tasks.observe.spans import NS, Span, current_lane


class Submission:
    """Measures the time from a decision, such as to sync, until the servers or ranks have begun; create it when deciding.

    Args:
        whom: the processes, in the plural; the span's lane is `submitting WHOM`.
        decided_ns: time of the decision, in nanoseconds since 1970; None: now.

    Example: two servers begin 20 and 50 ms after the decision: the span `submitting` lasts 50 ms, the skew is 30 ms.
    """

    def __init__(self, whom: str, decided_ns: int | None = None) -> None:
        self._whom, self._lane = whom, current_lane()
        self._decided_ns = time.time_ns() if decided_ns is None else decided_ns
        self._starts_ns: dict[str, int] = {}

    def note_start(self, who: str, at_ns: int) -> None:
        """Record when a process began, in nanoseconds since 1970; only its first start counts."""
        # A server that is sent the weights once more began with the first attempt.
        self._starts_ns.setdefault(who, at_ns)

    @property
    def n_started(self) -> int:
        """Number of processes that have begun the work."""
        return len(self._starts_ns)

    def book(self) -> None:
        """Record a span from the decision to the last start, in the lane `submitting WHOM`; do nothing without a start."""
        if self._lane is None or not self._starts_ns:
            return
        recorder, until_ns = self._lane.recorder, self._last_ns - self._decided_ns
        lane, step = f"submitting {self._whom}", self._lane.step
        recorder.add(Span(recorder.process, lane, "submitting", step, self._decided_ns, until_ns))

    def metrics(self, prefix: str = "submit/") -> list[Metric]:
        """Return the metrics last_start_s and skew_s, their names begun by `prefix`; empty if no process has begun."""
        if not self._starts_ns:
            return []
        values = {"last_start_s": self.last_start_s, "skew_s": self.skew_s}
        return [Metric(f"{prefix}{name}", ALL, "value", value) for name, value in values.items()]

    @property
    def last_start_s(self) -> float:
        """Seconds from the decision to the last start; needs a recorded start."""
        return NS * (self._last_ns - self._decided_ns)

    @property
    def skew_s(self) -> float:
        """Seconds from the first start to the last; needs a recorded start."""
        return NS * (self._last_ns - min(self._starts_ns.values()))

    @property
    def _last_ns(self) -> int:
        return max(self._decided_ns, *self._starts_ns.values())
