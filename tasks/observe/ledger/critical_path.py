"""The critical path of a step: the chain of spans, without gaps, that decided how long it took."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.observe.ledger.lanes import kin_of
from tasks.observe.ledger.timeline import (
    FLOW,
    IDLE,
    LINE,
    MAIN,
    UNATTRIBUTED,
    WHOLE,
    Ints,
    Timeline,
    is_trainer,
    overlap,
)
from tasks.observe.ledger.walk import Segment, Told, Walk

STRAGGLERS = "waiting_for_stragglers"
COLLECTING, EVALUATION, SERVICES, TRAINER = "collecting", "evaluation", "services", "trainer"
WAITS_FOR = {
    "collect": COLLECTING,
    STRAGGLERS: COLLECTING,
    "evaluate": EVALUATION,
    "train": TRAINER,
    "sync": SERVICES,
    "checkpoint": TRAINER,
    "export": TRAINER,
}
"""Spans of the step's line in which it waits for others, and for whom."""
BESIDE_SYNC = ["generating", IDLE]
"""What servers do that no transfer of weights waits for."""
CLOCKS_US = 1000
"""What a clock may be ahead of another: who ended so much after a wait for it has ended it."""
LANES = {COLLECTING: r"\d|collect\.", EVALUATION: r"v\d|evaluate\."}
"""How lanes of the flow begin: of groups and their trajectories, and of those of an evaluation."""
CONTAINERS = [IDLE, STRAGGLERS, "collecting", "sampling", "collect", "evaluating"]
"""Spans of such lanes that are around what others do."""


def critical_paths(timeline: Timeline) -> pl.DataFrame:
    """The path through each window of a timeline.

    It is found backward. At a step's end the step's line was at work, or it waited: then the path goes on with what ended
    last among those that it waited for, back to where that began, there to what had held the same thing until then, and so
    on. A wait whose cause is a process goes on in that process.

    Returns:
        step, start, end (microseconds; those of a step follow each other without gaps and fill its windows), phase (what
        the step's line did: a name, or `unattributed`), process, lane, name, cause (of what it waited for; else its own).
    """
    line = _line(timeline)
    found = [segment for segment in _segments(timeline, line) if segment.end > segment.start]
    found.sort(key=lambda each: each.start)
    piece, start, end = np.array(found, np.int64).reshape(-1, 3).T
    which, cell, start, end = overlap(start, end, line.start, line.end)
    return _described(timeline, line, piece[which], cell, start, end)


@dataclass(frozen=True, slots=True)
class _Line:
    """The step's line as cells that fill all windows: `span` is an index into the spans, or -1 for nobody's."""

    step: Ints
    span: Ints
    start: Ints
    end: Ints


def _line(timeline: Timeline) -> _Line:
    """The pieces of the step's line within windows, and the gaps between them."""
    pieces, windows = timeline.pieces, timeline.windows
    window_start, window_end = windows["start"].to_numpy(), windows["end"].to_numpy()
    of_line = [at for at, each in enumerate(timeline.lanes) if each == (FLOW, LINE)]
    own = pieces.take(np.isin(pieces.lane, of_line))
    own = own.take((timeline.spans["name"][own.span] != WHOLE).to_numpy())
    which, _, start, end = overlap(own.start, own.end, window_start, window_end)
    # windows are disjoint: between each end or window's beginning and what begins next, or a window's end, lies a gap
    gap_start = np.sort(np.concatenate([window_start, end]))
    gap_end = np.sort(np.concatenate([start, window_end]))
    is_gap = gap_end > gap_start
    span = np.concatenate([own.span[which], np.full(int(is_gap.sum()), -1)])
    start, end = np.concatenate([start, gap_start[is_gap]]), np.concatenate([end, gap_end[is_gap]])
    order = np.argsort(start)
    window = np.searchsorted(window_start, start[order], side="right") - 1
    return _Line(windows["step"].to_numpy()[window], span[order], start[order], end[order])


def _segments(timeline: Timeline, line: _Line) -> Iterator[Segment]:
    """The path of every window, unordered."""
    names = timeline.spans["name"].to_list()
    others = _Others(timeline)
    at = 0
    while at < len(line.span):
        kind = WAITS_FOR.get(names[line.span[at]]) if line.span[at] >= 0 else None
        last = at
        while kind and last + 1 < len(line.span) and _goes_on(line, names, last, kind):
            last += 1
        start, end = int(line.start[at]), int(line.end[last])
        if kind is None:
            yield Segment(-1, start, end)
        else:
            yield from others.path(kind, int(line.step[at]), start, end)
        at = last + 1


def _goes_on(line: _Line, names: list[str], at: int, kind: str) -> bool:
    """True when the line waits for the same ones in its next cell, which follows this one."""
    span = line.span[at + 1]
    return bool(
        span >= 0
        and WAITS_FOR.get(names[span]) == kind
        and line.step[at + 1] == line.step[at]
        and line.start[at + 1] == line.end[at]
    )


class _Others:
    """The pieces that the step's line may wait for, by their ends; those of the flow by step and end."""

    def __init__(self, timeline: Timeline) -> None:
        lanes, pieces, spans = timeline.lanes, timeline.pieces, timeline.spans
        self._pieces = pieces
        self._lanes_of: dict[str, list[int]] = {}
        for at, (process, _) in sorted(enumerate(lanes), key=lambda each: each[1][1] != MAIN):
            self._lanes_of.setdefault(process, []).append(at)
        self._kin = [kin_of(process, lane) for process, lane in lanes]
        self._names, self._causes = (spans[column].to_numpy() for column in ("name", "cause"))
        name = self._names[pieces.span]
        step = spans["step"].to_numpy().astype(np.int64)[pieces.span]
        of_lane = {
            kind: ([process == FLOW and bool(re.match(begins, lane)) for process, lane in lanes], CONTAINERS)
            for kind, begins in LANES.items()
        }
        of_lane |= {
            TRAINER: ([is_trainer(process) for process, _ in lanes], [IDLE]),
            SERVICES: ([process != FLOW for process, _ in lanes], BESIDE_SYNC),
        }
        self._kinds: dict[str, tuple[Ints, Ints, Ints]] = {}
        for kind, (is_held, no_part) in of_lane.items():
            held = np.flatnonzero(np.array(is_held, bool)[pieces.lane] & ~np.isin(name, no_part))
            steps = step[held] if kind in LANES else np.zeros(len(held), np.int64)
            order = np.lexsort((pieces.end[held], steps))
            self._kinds[kind] = held[order], steps[order], pieces.end[held][order]

    def path(self, kind: str, step: int, start: int, end: int) -> Iterator[Segment]:
        """The path through a stretch in which the step's line waits for these."""
        pieces, steps, ends = self._kinds[kind]
        first, last = np.searchsorted(steps, [step, step + 1]) if kind in LANES else (0, len(pieces))
        ends = ends[first:last]
        low = first + int(np.searchsorted(ends, start, side="right"))
        high = first + int(np.searchsorted(ends, end + CLOCKS_US, side="right"))
        yield from Walk(
            self._told(pieces[low:high]), self._lanes_of, self._kin, follows_senders=kind == SERVICES
        ).back(start, end)

    def _told(self, pieces: Ints) -> list[Told]:
        held = self._pieces.take(pieces)
        columns = (pieces, held.lane, held.start, held.end, self._names[held.span], self._causes[held.span])
        return [Told(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _described(
    timeline: Timeline, line: _Line, piece: Ints, cell: Ints, start: Ints, end: Ints
) -> pl.DataFrame:
    """Segments with words: of what was waited for, or of the step's line itself."""
    span = np.where(piece >= 0, np.append(timeline.pieces.span, -1)[piece], line.span[cell])
    row = pl.Series(np.where(span >= 0, span, len(timeline.spans)))
    nobody = pl.DataFrame({"process": FLOW, "lane": LINE, "name": UNATTRIBUTED, "cause": ""})
    words = pl.concat([timeline.spans.select("process", "lane", "name", "cause"), nobody])
    phase = pl.Series(np.where(line.span[cell] >= 0, line.span[cell], len(timeline.spans)))
    return pl.DataFrame({"step": line.step[cell], "start": start, "end": end}).hstack(
        [words["name"][phase].alias("phase"), *words[row].get_columns()]
    )
