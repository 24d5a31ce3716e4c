"""What a rank does, from command to command, and what it waits for; told to the flow by rank 0."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.distributed as dist

from tasks.observe.metrics import Reduced
from tasks.observe.spans import NS, Recorder, Span, current_lane, recording, span
from tasks.sync.order import FIRST_RANK
from tasks.sync.place import this_machine
from tasks.train.collectives import Collectives, Visits, clock_shifts, waits
from tasks.train.process_group import Ranks
from tasks.train.rank_spans import IDLE, WAITING, process_of, since_idle

T = TypeVar("T")

LANE = "main"
NO_COMMAND = "no command"
"""Cause of being idle; the flow's spans say what it does meanwhile."""
PARTS = (
    "handing_over",
    "recomputing",
    "packing",
    "forward",
    "backward",
    "optimizer",
    "annotating",
    "measuring",
)
"""Of a train step; what each takes is the metric train/<part>_s."""


@dataclass(frozen=True, slots=True)
class Told(Generic[T]):
    """What one rank tells rank 0 of its time, and of what else it was asked for."""

    beside: T
    machine: str
    spans: Sequence[Span]
    visits: Visits


class Timeline:
    """One rank's spans, of the process trainer/RANK.

    Rank 0 takes those of the others over where ranks come together anyway (`exchange`); what a rank does after that goes
    with the next time.

    Args:
        ranks: this process among them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._machine = this_machine()
        self._recorder = Recorder(process_of(ranks.rank))
        self._collectives = Collectives(ranks.device)
        self._of_others: list[Span] = []
        self._idle_since = time.perf_counter_ns()
        if ranks.world_size > 1:
            self._collectives.watch()

    @contextmanager
    def command(self, step: int, taken_ns: int = 0) -> Iterator[None]:
        """Have what goes on inside, and what it was idle before, belong to a step.

        Args:
            step: -1 for none.
            taken_ns: when rank 0 took the command, in nanoseconds since 1970; since then this rank has waited for it.
        """
        with recording(self._recorder, step=step, lane=LANE):
            self._end_idle(taken_ns)
            try:
                yield
            finally:
                self._idle_since = time.perf_counter_ns()

    def begin(self) -> None:
        """Begin to note when this rank comes to collectives; every rank calls it when it begins a command."""
        self._collectives.begin()

    def exchange(self, beside: T) -> list[T]:
        """[W] what each rank has beside its spans, on rank 0; nothing on the others. A collective."""
        with span("measuring"):
            visits = self._collectives.visits(self._recorder.since_1970)
            own = Told(beside, self._machine, self._recorder.take(), visits)
            every = [own] * self._world_size if self._rank == 0 else None
            if self._world_size > 1:
                dist.gather_object(own, every)
            self._collectives.begin()
            if every is None:
                return []
            self._of_others += joined(every)
        return [each.beside for each in every]

    def of_ranks(self) -> list[Sequence[Span]]:
        """[W] spans of the command under way, as of the last exchange; on rank 0 alone."""
        return [
            since_idle([each for each in self._of_others if each.process == process_of(rank)])
            for rank in range(self._world_size)
        ]

    def take(self) -> Sequence[Span]:
        """This rank's spans, and what it has of others', which are kept no longer."""
        taken, self._of_others = [*self._of_others, *self._recorder.take()], []
        return taken

    def _end_idle(self, taken_ns: int) -> None:
        lane, now = current_lane(), time.perf_counter_ns()
        assert lane is not None, "it was opened just before"
        waited = lane.recorder.since_1970(now) - taken_ns if taken_ns else 0
        taken = now - min(max(waited, 0), now - self._idle_since)
        lane.add(IDLE, self._idle_since, taken, NO_COMMAND)
        if taken < now:
            lane.add(WAITING, taken, now, FIRST_RANK)


def joined(told: Sequence[Told[T]]) -> list[Span]:
    """Spans of all ranks by rank 0's clock, with their waits for each other inside of them."""
    shifts = clock_shifts([each.visits for each in told], [each.machine for each in told])
    found = [
        each._replace(started_ns=each.started_ns + shift)
        for rank, shift in zip(told, shifts, strict=True)
        for each in rank.spans
    ]
    steps = [max((each.step for each in rank.spans), default=-1) for rank in told]
    for wait in waits([rank.visits + shift for rank, shift in zip(told, shifts, strict=True)]):
        duration = wait.ended_ns - wait.started_ns
        place = process_of(wait.rank), LANE, WAITING, steps[wait.rank], wait.started_ns, duration
        found.append(Span(*place, process_of(wait.slowest)))
    return found


def owned_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds that each name owns in one lane: of nested spans the innermost is the owner.

    Example: a forward pass of 3 s that waits for another rank for 1 s has 2, the wait 1.
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
    """Metrics of a step from the ranks' spans: of each part the most and the spread, and which rank works longest.

    Example: forward passes of 2 s and 3 s are train/forward_s 3 and train/forward_spread_s 1.
    """
    of_ranks = [owned_seconds(each) for each in spans]
    starts = [min(span.started_ns for span in each if span.name != WAITING) for each in spans]
    yield "train/start_skew_s", Reduced("max", NS * (max(starts) - min(starts)))
    for part in (*PARTS, WAITING):
        seconds = [each.get(part, 0.0) for each in of_ranks]
        if any(seconds):
            yield f"train/{part}_s", Reduced("max", max(seconds))
            yield f"train/{part}_spread_s", Reduced("max", max(seconds) - min(seconds))
    work = [sum(each.get(part, 0.0) for part in PARTS) for each in of_ranks]
    yield "train/slowest_rank", Reduced("max", float(work.index(max(work))))
    yield "train/rank_spread_s", Reduced("max", max(work) - min(work))
