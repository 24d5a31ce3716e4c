"""Find the critical path of a step: the gapless chain of spans that determined its duration."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import polars as pl

from rollmill.tasks.look.ledger.span_timeline import (
    COLLECTING,
    EVALUATION,
    FLOW,
    IDLE,
    LANES,
    LINE,
    MAIN,
    STRAGGLERS,
    UNATTRIBUTED,
    WHOLE,
    Ints,
    LaneFamily,
    SpanTimeline,
    family_from_lane,
    is_trainer,
    is_wait,
    overlap,
)

SLOTS = {"slot": "generating", "workers": "scoring", "calls": "scoring"}
"""Work that occupies a resource, by the cause of the wait for it: the wait ends when such work ends."""


class PathSegment(NamedTuple):
    """A segment of a critical path: index of a timeline piece (-1: the flow's step lane), start and end in microseconds."""

    piece: int
    start: int
    end: int


class NamedPiece(NamedTuple):
    """A piece of the timeline: its index, lane (index), start and end in microseconds, and its span's name and cause."""

    piece: int
    lane: int
    start: int
    end: int
    name: str
    cause: str


_by_end = attrgetter("end")


class PathWalk:
    """Finds a critical path by walking backward in time through `pieces`, which may be on it and are ordered by their ends.

    `lanes_of` are the lanes of each process, `main` first; `kin` is the family of each lane. With `follows_senders`, the start of a
    lane continues in the lane that caused it, as a receiver does in its sender.
    """

    def __init__(
        self,
        pieces: list[NamedPiece],
        lanes_of: dict[str, list[int]],
        kin: list[LaneFamily],
        *,
        follows_senders: bool,
    ) -> None:
        self._lanes_of, self._pieces, self._follows_senders = lanes_of, pieces, follows_senders
        self._kin, self._of_kin = kin, dict[LaneFamily, list[NamedPiece]]()
        self._of_lane: dict[int, list[NamedPiece]] = {}
        self._of_name: dict[str, list[NamedPiece]] = {}
        self._of_groups: list[NamedPiece] = []
        self._lanes_of_process = {lane: lanes for lanes in lanes_of.values() for lane in lanes}
        for each in pieces:
            self._of_lane.setdefault(each.lane, []).append(each)
            self._of_kin.setdefault(kin[each.lane], []).append(each)
            self._of_name.setdefault(each.name, []).append(each)
            if kin[each.lane].family and not kin[each.lane].is_part:
                self._of_groups.append(each)

    def back(self, start: int, end: int) -> Iterator[PathSegment]:
        """Yield the segments of the critical path from `end` back to `start`, last first."""
        time, held = end, self._pieces[-1] if self._pieces else None
        while time > start:
            if held is None or held.end <= start:
                yield PathSegment(-1, start, time)
                return
            # No span is open between the end of the piece and the time: that belongs to the step lane.
            if held.end < time:
                yield PathSegment(-1, held.end, time)
                time = held.end
            before = self._find_releaser(held, time)
            until = max(start, held.start)
            if before is not None and is_wait(held.name):
                until = max(until, min(time, before.end))
            yield PathSegment(held.piece, until, time)
            time, held = until, before

    def _find_releaser(self, held: NamedPiece, time: int) -> NamedPiece | None:
        """Return the piece that precedes `held` on the path: the one that ended its wait at `time`, or that preceded its work."""
        before = self._covering(held.lane, held.start)
        if not is_wait(held.name):
            return before or self._sender(held) or self._earlier(held)
        if other := self._find_awaited(held, time):
            return other
        # A slot, a worker or a call became free when the last work in another lane that held one had ended.
        users = self._of_name.get(SLOTS.get(held.cause, ""), [])
        ended = range(bisect_right(users, time, key=_by_end) - 1, -1, -1)
        last = next((users[at] for at in ended if users[at].lane != held.lane), None)
        return last if last and last.end > held.start else before

    def _find_awaited(self, held: NamedPiece, time: int) -> NamedPiece | None:
        """Return the work, at `time`, of the process that a wait is for; if that process waited too, follow its wait."""
        # Two processes may wait for each other; the walk ends when it meets one again.
        seen, cause = set[str](), held.cause
        while cause in self._lanes_of and cause not in seen:
            seen.add(cause)
            # Of each lane the piece at that time, or before a gap in its record the last one.
            latest = (
                self._covering(lane, time) or self._last(self._of_lane.get(lane, []), time)
                for lane in self._lanes_of[cause]
            )
            had = [each for each in latest if each and each.end >= held.start]
            if work := [each for each in had if not is_wait(each.name)]:
                return max(work, key=lambda each: min(each.end, time))
            cause = had[0].cause if had else ""
        return None

    def _earlier(self, held: NamedPiece) -> NamedPiece | None:
        """Return the last piece that ended before `held` began in its lane, or in lanes of its group, trajectories or process."""
        kin = self._kin[held.lane]
        # The lanes of a rank or server share its process, so the work in all of them precedes.
        is_others = kin.is_part and not kin.family
        lanes = self._lanes_of_process[held.lane] if is_others else [held.lane]
        ended = [last for lane in lanes if (last := self._last(self._of_lane.get(lane, []), held.start))]
        own = max(ended, key=_by_end, default=None)
        if own and kin.is_part:
            return own
        # Groups begin one after another: what preceded the first piece of one is the last piece of another.
        if own is None and kin.family and not kin.is_part:
            began = [self._of_kin.get(LaneFamily("", is_part=False), []), self._of_groups]
            before = [last for pieces in began if (last := self._last(pieces, held.start))]
            return max(before, key=_by_end, default=None)
        for related in (LaneFamily(kin.family, not kin.is_part), LaneFamily("", is_part=False)):
            others = self._of_kin.get(related, []) if related != kin else []
            if last := self._last(others, held.start):
                return max([last, *([own] if own else [])], key=_by_end)
        return own

    def _last(self, pieces: list[NamedPiece], time: int) -> NamedPiece | None:
        """Return the last of these pieces that ended by `time`."""
        at = bisect_right(pieces, time, key=_by_end)
        return pieces[at - 1] if at else None

    def _sender(self, held: NamedPiece) -> NamedPiece | None:
        """Return the piece of another lane, with the smallest index, that was running just before `held` began.

        Return None if there is no such piece, or if the walk has follows_senders=False.
        """
        lanes = self._of_lane.keys() - {held.lane} if self._follows_senders else ()
        active = [each for lane in lanes if (each := self._covering(lane, held.start))]
        return min(active, key=lambda each: each.piece, default=None)

    def _covering(self, lane: int, time: int) -> NamedPiece | None:
        """Return the piece of a lane that contains the instant before `time`."""
        of_lane = self._of_lane.get(lane, [])
        at = bisect_left(of_lane, time, key=_by_end)
        return of_lane[at] if at < len(of_lane) and of_lane[at].start < time else None


SERVICES, TRAINER = "services", "trainer"
WAITS_FOR = {
    "collect": COLLECTING,
    STRAGGLERS: COLLECTING,
    "evaluate": EVALUATION,
    "train": TRAINER,
    "sync": SERVICES,
    "checkpoint": TRAINER,
    "export": TRAINER,
}
"""Spans in which the step lane waits for others, and whom it waits for."""
UNRECORDED = {COLLECTING: -2, EVALUATION: -3}
"""Index, instead of a piece's, of time without a span in work that the step lane waits for later."""
NOT_AWAITED_BY_SYNC = ["generating", IDLE]
"""Work of servers that a weight transfer does not wait for."""
# Tolerated difference in microseconds: clocks of other processes are correct within a message's latency, so what ends this
# late after a wait still ended the wait.
CLOCKS_US = 1000


def find_critical_paths(timeline: SpanTimeline, episodes: pl.DataFrame) -> pl.DataFrame:
    """Find the critical path of each step: the gapless chain of work, back from its end, that determined its duration.

    The walk starts at the end of the step. Where the step lane worked, the path stays in it. Where it waited, the path
    continues with the awaited work that ended last, back to its start, then with whatever released the resource it had waited
    for, and so on. A wait for a process continues in that process. Work that the step lane did itself while awaited work ran is
    not on the path. `episodes` are those of `collect_episodes`.

    Returns:
        Columns step, start, end (microseconds; the segments of a step fill its window without gaps), phase (name of the step
        lane's span, or `unattributed`), process, lane, name, cause.
    """
    line = _build_step_line(timeline)
    found = [segment for segment in _segments(timeline, episodes, line) if segment.end > segment.start]
    found.sort(key=lambda each: each.start)
    piece, start, end = np.array(found, np.int64).reshape(-1, 3).T
    which, cell, start, end = overlap(start, end, line.start, line.end)
    return _describe_segments(timeline, line, piece[which], cell, start, end)


@dataclass(frozen=True, slots=True)
class _StepLine:
    """The flow's step lane, cut into cells without gaps; `span` is the index of a cell's span, or -1 where none is open."""

    step: Ints
    span: Ints
    start: Ints
    end: Ints


def _build_step_line(timeline: SpanTimeline) -> _StepLine:
    """Return the cells of the flow's step lane within the steps' windows: its pieces, and the gaps between them."""
    pieces, windows = timeline.pieces, timeline.windows
    window_start, window_end = windows["start"].to_numpy(), windows["end"].to_numpy()
    of_line = [at for at, each in enumerate(timeline.lanes) if each == (FLOW, LINE)]
    own = pieces.take(np.isin(pieces.lane, of_line))
    own = own.take((timeline.spans["name"][own.span] != WHOLE).to_numpy())
    which, _, start, end = overlap(own.start, own.end, window_start, window_end)
    # Windows are disjoint, so a gap is between an end, or the start of a window, and the next start, or the end of a window.
    gap_start = np.sort(np.concatenate([window_start, end]))
    gap_end = np.sort(np.concatenate([start, window_end]))
    is_gap = gap_end > gap_start
    span = np.concatenate([own.span[which], np.full(int(is_gap.sum()), -1)])
    start, end = np.concatenate([start, gap_start[is_gap]]), np.concatenate([end, gap_end[is_gap]])
    order = np.argsort(start)
    window = np.searchsorted(window_start, start[order], side="right") - 1
    return _StepLine(windows["step"].to_numpy()[window], span[order], start[order], end[order])


def _segments(timeline: SpanTimeline, episodes: pl.DataFrame, line: _StepLine) -> Iterator[PathSegment]:
    """Yield the critical path of every step, last segment first."""
    names = timeline.spans["name"].to_list()
    others = _AwaitedPieces(timeline, episodes)
    at, until = len(line.span) - 1, int(line.end[-1]) if len(line.span) else 0
    while at >= 0:
        kind = WAITS_FOR.get(names[line.span[at]]) if line.span[at] >= 0 else None
        first, end = at, min(until, int(line.end[at]))
        while kind and first and _continues(line, names, first - 1, kind):
            first -= 1
        start = int(line.start[first])
        if start < end and kind is None:
            yield PathSegment(-1, start, end)
        elif start < end and kind:
            waited, start = start, others.find_start(kind, int(line.step[at]), start, end)
            for segment in others.path(kind, int(line.step[at]), start, end):
                yield from _split_concurrent(segment, kind, waited)
        at, until = first - 1, min(until, start)


def _split_concurrent(segment: PathSegment, kind: str, waited: int) -> Iterator[PathSegment]:
    """Split a segment without a span at the start of the wait: earlier time is the awaited work's, later the step lane's."""
    if segment.piece >= 0 or segment.start >= waited:
        yield segment
        return
    if segment.end > waited:
        yield segment._replace(start=waited)
    yield PathSegment(UNRECORDED[kind], segment.start, min(segment.end, waited))


def _continues(line: _StepLine, names: list[str], at: int, kind: str) -> bool:
    """Return True if cell `at` of the step lane waits for the same kind of work as the next cell, in the same step."""
    span = line.span[at]
    return bool(
        span >= 0
        and WAITS_FOR.get(names[span]) == kind
        and line.step[at + 1] == line.step[at]
        and line.start[at + 1] == line.end[at]
    )


class _AwaitedPieces:
    """Pieces of the timeline that the step lane may wait for, by kind of work and ordered by end."""

    def __init__(self, timeline: SpanTimeline, episodes: pl.DataFrame) -> None:
        lanes, pieces, spans = timeline.lanes, timeline.pieces, timeline.spans
        self._pieces = pieces
        self._lanes_of: dict[str, list[int]] = {}
        # `main` comes first: it is the lane whose wait is followed when a process only waited.
        for at, (process, _) in sorted(enumerate(lanes), key=lambda each: each[1][1] != MAIN):
            self._lanes_of.setdefault(process, []).append(at)
        self._kin = [family_from_lane(process, lane) for process, lane in lanes]
        self._names, self._causes = (spans[column].to_numpy() for column in ("name", "cause"))
        self._began: dict[tuple[str, int], int] = {
            (use, step): began
            for use, step, began in episodes.group_by("use", "step").agg(pl.col("start").min()).iter_rows()
        }
        self._kinds: dict[str, tuple[Ints, Ints, Ints]] = {}
        for kind in LANES:
            own = episodes.filter(pl.col("use") == kind).sort("step", "end", maintain_order=True)
            columns = own.select("piece", pl.col("step").cast(pl.Int64), "end").get_columns()
            self._kinds[kind] = columns[0].to_numpy(), columns[1].to_numpy(), columns[2].to_numpy()
        name = self._names[pieces.span]
        of_process = {
            TRAINER: ([is_trainer(process) for process, _ in lanes], [IDLE]),
            SERVICES: ([process != FLOW for process, _ in lanes], NOT_AWAITED_BY_SYNC),
        }
        for kind, (is_held, no_part) in of_process.items():
            held = np.flatnonzero(np.array(is_held, bool)[pieces.lane] & ~np.isin(name, no_part))
            held = held[np.argsort(pieces.end[held], kind="stable")]
            self._kinds[kind] = held, np.zeros(len(held), np.int64), pieces.end[held]

    def find_start(self, kind: str, step: int, start: int, end: int) -> int:
        """Return the start of the work that the step lane waited for during [start, end]; it may be earlier than `start`."""
        # Work that ended before the wait delayed nothing.
        if not len(self._find_ends(kind, step, start, end)):
            return start
        return min(start, self._began.get((kind, step), start))

    def path(self, kind: str, step: int, start: int, end: int) -> Iterator[PathSegment]:
        """Yield the critical path through an interval in which the step lane waited for this kind of work, last segment first."""
        pieces = self._name_pieces(self._find_ends(kind, step, start, end))
        walk = PathWalk(pieces, self._lanes_of, self._kin, follows_senders=kind == SERVICES)
        yield from walk.back(start, end)

    def _find_ends(self, kind: str, step: int, start: int, end: int) -> Ints:
        """Return the indices of this kind's pieces that end in an interval or up to CLOCKS_US after it, ordered by end."""
        pieces, steps, ends = self._kinds[kind]
        first, last = np.searchsorted(steps, [step, step + 1]) if kind in LANES else (0, len(pieces))
        bounds = np.searchsorted(ends[first:last], [start, end + CLOCKS_US], side="right")
        return pieces[slice(*(first + bounds))]

    def _name_pieces(self, pieces: Ints) -> list[NamedPiece]:
        held = self._pieces.take(pieces)
        columns = (pieces, held.lane, held.start, held.end, self._names[held.span], self._causes[held.span])
        return [NamedPiece(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _describe_segments(
    timeline: SpanTimeline, line: _StepLine, piece: Ints, cell: Ints, start: Ints, end: Ints
) -> pl.DataFrame:
    """Return the table of `find_critical_paths`: segments with the names of the awaited work, or of the step lane."""
    n, of_line = len(timeline.spans), np.where(line.span[cell] >= 0, line.span[cell], len(timeline.spans))
    of_piece = timeline.pieces.span[np.maximum(piece, 0)] if len(timeline.pieces.span) else piece
    # Rows for segments without a span follow those of the spans: of the step lane, of rollouts, of an evaluation.
    row = pl.Series(np.where(piece >= 0, of_piece, np.where(piece == -1, of_line, n - piece - 1)))
    lanes, names = [LINE, "collect.", "evaluate."], [UNATTRIBUTED, "collect", "evaluate"]
    nobody = pl.DataFrame({"process": FLOW, "lane": lanes, "name": names, "cause": ""})
    words = pl.concat([timeline.spans.select("process", "lane", "name", "cause"), nobody])
    phase = pl.Series(of_line)
    return pl.DataFrame({"step": line.step[cell], "start": start, "end": end}).hstack(
        [words["name"][phase].alias("phase"), *words[row].get_columns()]
    )
