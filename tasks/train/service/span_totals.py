"""Spans of all ranks for one command, each wait for a rank included, limited in number.

There are about ranks x collectives waits: millions a step on hundreds of ranks. Above a limit the spans of a rank are merged
by name and cause. What is merged becomes one span as long as all of them, so that the sum of each name stays the same.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rollmill.tasks.observe.spans import Span
from rollmill.tasks.train.collectives import RankWaits
from rollmill.tasks.train.service.rank_spans import IDLE, LANE, WAITING, rank_process

SPAN_LIMIT = 8_000
"""Spans of all ranks together for one command, above which they are merged."""
SINGLE_WAITS = 100
"""The longest waits of a command, which stay single spans."""
OTHER_RANKS = "other ranks"
"""Cause of merged waits for several ranks."""

Ints: TypeAlias = npt.NDArray[np.int64]


def limit_spans(
    own: Sequence[Sequence[Span]], waits: Sequence[RankWaits], limit: int = SPAN_LIMIT
) -> list[Span]:
    """Return the spans of all ranks and their waits for each other, merged if they are more than `limit`.

    Idle time, waits for a command and the `SINGLE_WAITS` longest waits for a rank stay single. Between two of them, a rank's
    spans become one for each name and cause, one after another without nesting.
    Waits are merged by the rank that they were for, as long as the limit allows, and have the cause OTHER_RANKS beyond it.

    Args:
        own: [W] the spans that each rank recorded, by one clock; none of them crosses another.
        waits: [W] each rank's waits in collectives, by the same clock.
        limit: number of spans above which they are merged.

    Example: forward from 0 to 9 ms with waits for rank 1 from 2 to 3 and from 5 to 7 ms becomes forward from 0 to 6 ms and
    a wait from 6 to 9 ms.
    """
    if sum(map(len, own)) + sum(len(each.started_ns) for each in waits) <= limit:
        every = (_list_single(rank, *each) for rank, each in enumerate(zip(own, waits, strict=True)))
        return [span for spans in every for span in spans]
    durations = np.concatenate([each.ended_ns - each.started_ns for each in waits])
    least_ns = _find_least(durations, SINGLE_WAITS)
    spans, segments = list[Span](), list[_Segment]()
    for rank, (recorded, waited) in enumerate(zip(own, waits, strict=True)):
        single, merged = _cut(rank, recorded, waited, least_ns)
        spans += single
        segments += merged
    room = limit - len(spans) - sum(len(each.work) + 1 for each in segments)
    totals_ns = np.concatenate([each.waits.total_ns for each in segments] or [np.empty(0, np.int64)])
    least_ns = _find_least(totals_ns, room)
    for each in segments:
        spans += each.lay_out(least_ns)
    # A command's spans are those after the last idle one.
    return sorted(spans, key=lambda each: each.started_ns)


class _Total(NamedTuple):
    """Time of one name, step and cause within a segment."""

    name: str
    step: int
    cause: str
    total_ns: int


class _WaitTotals(NamedTuple):
    """Waits within a segment by the rank they were for: arrays of the ranks, and of the sum for each."""

    slowest: Ints
    total_ns: Ints

    @classmethod
    def add_up(cls, waits: RankWaits) -> "_WaitTotals":
        """Add up waits by the rank that they were for."""
        durations = waits.ended_ns - waits.started_ns
        slowest, place = np.unique(waits.slowest, return_inverse=True)
        total_ns = np.zeros_like(slowest)
        np.add.at(total_ns, place, durations)
        return cls(slowest, total_ns)


class _Piece(NamedTuple):
    """Time in which a span was the innermost one."""

    started_ns: int
    ended_ns: int
    span: Span


@dataclass(frozen=True, slots=True)
class _Segment:
    """A rank's time between two single spans: what it did and which ranks it waited for, in order of first occurrence."""

    rank: int
    started_ns: int
    step: int
    work: list[_Total]
    waits: _WaitTotals

    @classmethod
    def build(
        cls, rank: int, own: Sequence[Span], pieces: Sequence[_Piece], waits: RankWaits, first: int, end: int
    ) -> "_Segment | None":
        """Add up what of pieces and waits is from `first` to `end`; None if nothing is."""
        waits = waits.take((waits.started_ns >= first) & (waits.started_ns < end))
        inside = [
            _Piece(max(each.started_ns, first), min(each.ended_ns, end), each.span)
            for each in pieces
            if each.started_ns < end and each.ended_ns > first
        ]
        starts = [each.started_ns for each in inside[:1]] + waits.started_ns[:1].tolist()
        if not starts:
            return None
        edges = np.array([(each.started_ns, each.ended_ns) for each in inside], np.int64).reshape(-1, 2)
        waited = _waited_until(waits, edges)
        work_ns = (edges[:, 1] - edges[:, 0]) - (waited[:, 1] - waited[:, 0])
        totals = Counter[tuple[str, int, str]]()
        for (_, _, span), each in zip(inside, work_ns.tolist(), strict=True):
            totals[span.name, span.step, span.cause] += each
        work = [_Total(*key, each) for key, each in totals.items()]
        return cls(rank, min(starts), _last_step(own), work, _WaitTotals.add_up(waits))

    def lay_out(self, least_ns: int) -> Iterator[Span]:
        """Yield a span for each total, one after another; waits for ranks with less than `least_ns` become one."""
        at = self.started_ns
        for each in (*self.work, *self._name_waits(least_ns)):
            yield Span(rank_process(self.rank), LANE, each.name, each.step, at, each.total_ns, each.cause)
            at += each.total_ns

    def _name_waits(self, least_ns: int) -> Iterator[_Total]:
        named = self.waits.total_ns >= least_ns
        for slowest, total_ns in zip(*(each[named].tolist() for each in self.waits), strict=True):
            yield _Total(WAITING, self.step, rank_process(slowest), total_ns)
        if not named.all():
            yield _Total(WAITING, self.step, OTHER_RANKS, int(self.waits.total_ns[~named].sum()))


def _list_single(rank: int, own: Sequence[Span], waits: RankWaits) -> list[Span]:
    step, process = _last_step(own), rank_process(rank)
    columns = (each.tolist() for each in waits)
    return [
        *own,
        *(
            Span(process, LANE, WAITING, step, started, ended - started, rank_process(slowest))
            for started, ended, slowest in zip(*columns, strict=True)
        ),
    ]


def _last_step(own: Sequence[Span]) -> int:
    return max((each.step for each in own), default=-1)


def _find_least(values: Ints, most: int) -> int:
    """Return the least integer that at most `most` of the values reach.

    Example: at most two of 5, 1, 4 and 4 reach 5, and three reach 4: with `most` 2 it is 5.
    """
    if len(values) <= max(most, 0):
        return 0
    if most <= 0:
        return int(values.max()) + 1
    return int(np.partition(values, -most - 1)[-most - 1]) + 1


def _cut(
    rank: int, own: Sequence[Span], waits: RankWaits, least_ns: int
) -> tuple[list[Span], list[_Segment]]:
    """Divide a rank's time into single spans and the segments between them; waits of at least `least_ns` are single."""
    is_long = waits.ended_ns - waits.started_ns >= least_ns
    pieces = _list_pieces(each for each in own if each.lane == LANE and each.name not in (IDLE, WAITING))
    single = [each for each in own if each.lane != LANE or each.name in (IDLE, WAITING)]
    long_waits = _list_single(rank, (), waits.take(is_long))
    single += [each._replace(step=_last_step(own)) for each in long_waits]
    taken = [(each.started_ns, each.started_ns + each.duration_ns) for each in single if each.lane == LANE]
    # The span around the exchange of spans is still open, and waits in it are no part of those that have ended.
    taken = sorted([*taken, *((piece.ended_ns, piece.ended_ns) for piece in pieces[-1:])])
    waits = waits.take(~is_long)
    edges = [0, *(edge for each in taken for edge in each), np.iinfo(np.int64).max]
    bounds = zip(edges[::2], edges[1::2], strict=True)
    segments = [_Segment.build(rank, own, pieces, waits, *each) for each in bounds]
    return single, [each for each in segments if each is not None]


def _list_pieces(spans: Iterable[Span]) -> list[_Piece]:
    """Cut nested spans into disjoint pieces, in the order of time.

    Example: a from 0 to 9 with b in it from 2 to 5 is a from 0 to 2, b from 2 to 5 and a from 5 to 9.
    """
    pieces, outer, time = list[_Piece](), list[tuple[int, Span]](), 0

    def advance(until: int) -> None:
        nonlocal time
        if outer and until > time:
            pieces.append(_Piece(time, until, outer[-1][1]))
        time = until

    for span in sorted(spans, key=lambda each: (each.started_ns, -each.duration_ns)):
        while outer and outer[-1][0] <= span.started_ns:
            advance(outer[-1][0])
            outer.pop()
        advance(span.started_ns)
        outer.append((span.started_ns + span.duration_ns, span))
    while outer:
        advance(outer[-1][0])
        outer.pop()
    return pieces


def _waited_until(waits: RankWaits, times: Ints) -> Ints:
    """Return how many nanoseconds of the waits, which are disjoint and in order, were before each of the times."""
    if not len(waits.started_ns):
        return np.zeros_like(times)
    durations = waits.ended_ns - waits.started_ns
    place = np.searchsorted(waits.started_ns, times, side="right") - 1
    in_last = np.minimum(times - waits.started_ns[place], durations[place])
    return np.where(place < 0, 0, (np.cumsum(durations) - durations)[place] + in_last)
