"""What each rank does from command to command, as spans that rank 0 collects and the flow stores."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rollmill.tasks.observe.metrics import MetricTable, Reduced
from rollmill.tasks.observe.spans import NS, Recorder, Span, current_lane, recording, span
from rollmill.tasks.processes.machine import machine_id
from rollmill.tasks.sync.weight_messages import FIRST_RANK
from rollmill.tasks.train.collectives import Visits, clock_shifts, find_waits, times
from rollmill.tasks.train.rank_messages import gather_messages
from rollmill.tasks.train.service.rank_spans import IDLE, LANE, WAITING, rank_process, spans_since_idle
from rollmill.tasks.train.service.ranks import Ranks
from rollmill.tasks.train.service.span_totals import limit_spans

NO_COMMAND = "no command"
"""Cause of idle time; the flow's spans show what the flow does then."""
PHASES = (
    "reading_batch",
    "recomputing",
    "packing",
    "forward",
    "backward",
    "optimizer",
    "annotating",
    "measuring",
)
"""Phases of a training step; the metric train/<phase>_s has the seconds of each."""


class _Report(NamedTuple):
    """What a rank sends rank 0: its metrics, the id of its machine, its spans, and when it entered and left collectives."""

    table: MetricTable
    machine: str
    spans: list[Span]
    visits: Visits


class RankTimeline:
    """Records one rank's spans (timed activities), under the process name trainer/RANK.

    Rank 0 collects the spans of the other ranks at each `exchange`.

    Args:
        ranks: rank and number of ranks of this process.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._machine = machine_id()
        self._recorder = Recorder(rank_process(ranks.rank))
        self._of_others: list[Span] = []
        self._idle_since = time.perf_counter_ns()

    @contextmanager
    def command(self, step: int, taken_ns: int = 0) -> Iterator[None]:
        """Record the spans of the `with` block, and the idle time before it, as part of a step.

        Args:
            step: number of the step; -1 for none.
            taken_ns: when rank 0 took the command, in nanoseconds since 1970; since then this rank has waited for it.
        """
        with recording(self._recorder, step=step, lane=LANE):
            self._end_idle(taken_ns)
            try:
                yield
            finally:
                self._idle_since = time.perf_counter_ns()

    def exchange(self, table: MetricTable | None = None) -> list[MetricTable]:
        """Send spans and metrics to rank 0; returns the [W] ranks' metrics there, nothing on the others. A collective."""
        with span("measuring"):
            visits = times.visits(self._recorder.since_1970)
            own = _Report(table or MetricTable(), self._machine, list(self._recorder.take()), visits)
            every = gather_messages(own, _Report)
            # All ranks have left the same collective, so that their lists match again from here on.
            times.begin()
            if every:
                tables, machines, spans, all_visits = zip(*every, strict=True)
                self._of_others += _merge_spans(machines, spans, all_visits)
                return list(tables)
        return []

    def spans_by_rank(self) -> list[Sequence[Span]]:
        """Return [W] spans of each rank's current command, up to the last `exchange`; on rank 0 alone."""
        of_ranks: dict[str, list[Span]] = {rank_process(rank): [] for rank in range(self._world_size)}
        for each in self._of_others:
            of_ranks[each.process].append(each)
        return [spans_since_idle(each) for each in of_ranks.values()]

    def take(self) -> Sequence[Span]:
        """Remove and return all recorded spans: this rank's, and on rank 0 those collected from the others."""
        taken, self._of_others = [*self._of_others, *self._recorder.take()], []
        return taken

    def _end_idle(self, taken_ns: int) -> None:
        lane, now = current_lane(), time.perf_counter_ns()
        assert lane is not None, "it was opened just before"
        waited = lane.recorder.since_1970(now) - taken_ns if taken_ns else 0
        # The clocks of two machines differ: a wait is neither negative nor longer than the idle time.
        taken = now - min(max(waited, 0), now - self._idle_since)
        lane.add(IDLE, self._idle_since, taken, NO_COMMAND)
        if taken < now:
            lane.add(WAITING, taken, now, FIRST_RANK)


def _merge_spans(
    machines: Sequence[str], spans: Sequence[Sequence[Span]], visits: Sequence[Visits]
) -> list[Span]:
    """Combine the spans of W ranks by rank 0's clock, and add their waits for each other in collectives.

    Args:
        machines: [W] id of each rank's machine.
        spans: [W] spans of each rank.
        visits: [W][N, 2] nanoseconds at which each rank entered and left each collective.
    """
    shifts = clock_shifts(visits, machines)
    shifted = [
        [each._replace(started_ns=each.started_ns + shift) for each in own]
        for own, shift in zip(spans, shifts, strict=True)
    ]
    return limit_spans(shifted, find_waits([own + shift for own, shift in zip(visits, shifts, strict=True)]))


def exclusive_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each span name in one lane, without the seconds of nested spans.

    Example: a forward pass of 3 s that waits for another rank for 1 s counts 2 s, the wait 1 s.
    """
    seconds, outer = defaultdict[str, float](float), list[Span]()
    for each in sorted(spans, key=lambda span: (span.started_ns, -span.duration_ns)):
        while outer and outer[-1].started_ns + outer[-1].duration_ns <= each.started_ns:
            outer.pop()
        seconds[each.name] += NS * each.duration_ns
        if outer:
            seconds[outer[-1].name] -= NS * each.duration_ns
        outer.append(each)
    return dict(seconds)


def rank_metrics(spans: Sequence[Sequence[Span]]) -> Iterator[tuple[str, Reduced]]:
    """Metrics of a step from the ranks' spans: maximum and spread of each phase, and the slowest rank.

    Example: forward passes of 2 s and 3 s are train/forward_s 3 and train/forward_spread_s 1.
    """
    of_ranks = [exclusive_seconds(each) for each in spans]
    starts = [min(span.started_ns for span in each if span.name != WAITING) for each in spans]
    yield "train/start_skew_s", Reduced("max", NS * (max(starts) - min(starts)))
    for part in (*PHASES, WAITING):
        seconds = [each.get(part, 0.0) for each in of_ranks]
        if any(seconds):
            yield f"train/{part}_s", Reduced("max", max(seconds))
            yield f"train/{part}_spread_s", Reduced("max", max(seconds) - min(seconds))
    work = [sum(each.get(part, 0.0) for part in PHASES) for each in of_ranks]
    yield "train/slowest_rank", Reduced("max", float(work.index(max(work))))
    yield "train/rank_spread_s", Reduced("max", max(work) - min(work))
