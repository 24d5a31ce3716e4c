"""The critical path of a step: the chain of spans, without gaps, that decided how long it took."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.observe.ledger.lanes import COLLECTING, EVALUATION, LANES, STRAGGLERS, kin_of
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
"""Spans of the step's line in which it waits for others, and for whom."""
BESIDE = {COLLECTING: -2, EVALUATION: -3}
"""In the place of a piece: what nobody has of those that the step's line waits for later."""
BESIDE_SYNC = ["generating", IDLE]
"""What servers do that no transfer of weights waits for."""
CLOCKS_US = 1000
"""What a clock may be ahead of another: who ended so much after a wait for it has ended it."""


def critical_paths(timeline: Timeline, episodes: pl.DataFrame) -> pl.DataFrame:
    """The path through each window of a timeline.

    It is found backward. At a step's end the step's line was at work, or it waited: then the path goes on with what ended
    last among those that it waited for, back to where that began, there to what had held the same thing until then, and so
    on. A wait whose cause is a process goes on in that process. What the line did itself while those were at work that it
    waited for later is not on the path.

    Args:
        timeline: of a run.
        episodes: of it; see `episodes_of`.

    Returns:
        step, start, end (microseconds; those of a step follow each other without gaps and fill its windows), phase (what
        the step's line did: a name, or `unattributed`), process, lane, name, cause (of what it waited for; else its own).
    """
    line = _line(timeline)
    found = [segment for segment in _segments(timeline, episodes, line) if segment.end > segment.start]
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


def _segments(timeline: Timeline, episodes: pl.DataFrame, line: _Line) -> Iterator[Segment]:
    """The path of every window, backward."""
    names = timeline.spans["name"].to_list()
    others = _Others(timeline, episodes)
    at, until = len(line.span) - 1, int(line.end[-1]) if len(line.span) else 0
    while at >= 0:
        kind = WAITS_FOR.get(names[line.span[at]]) if line.span[at] >= 0 else None
        first, end = at, min(until, int(line.end[at]))
        while kind and first and _goes_on(line, names, first - 1, kind):
            first -= 1
        start = int(line.start[first])
        if start < end and kind is None:
            yield Segment(-1, start, end)
        elif start < end and kind:
            waited, start = start, others.begun(kind, int(line.step[at]), start, end)
            for segment in others.path(kind, int(line.step[at]), start, end):
                yield from _beside(segment, kind, waited)
        at, until = first - 1, min(until, start)


def _beside(segment: Segment, kind: str, waited: int) -> Iterator[Segment]:
    """A segment that nobody has is the line's from where that waits; before, it is of those that it waits for later."""
    if segment.piece >= 0 or segment.start >= waited:
        yield segment
        return
    if segment.end > waited:
        yield segment._replace(start=waited)
    yield Segment(BESIDE[kind], segment.start, min(segment.end, waited))


def _goes_on(line: _Line, names: list[str], at: int, kind: str) -> bool:
    """True when the line waits for the same ones in a cell as in the next one, which follows it."""
    span = line.span[at]
    return bool(
        span >= 0
        and WAITS_FOR.get(names[span]) == kind
        and line.step[at + 1] == line.step[at]
        and line.start[at + 1] == line.end[at]
    )


class _Others:
    """The pieces that the step's line may wait for, by their ends; those of the flow by step and end."""

    def __init__(self, timeline: Timeline, episodes: pl.DataFrame) -> None:
        lanes, pieces, spans = timeline.lanes, timeline.pieces, timeline.spans
        self._pieces = pieces
        self._lanes_of: dict[str, list[int]] = {}
        for at, (process, _) in sorted(enumerate(lanes), key=lambda each: each[1][1] != MAIN):
            self._lanes_of.setdefault(process, []).append(at)
        self._kin = [kin_of(process, lane) for process, lane in lanes]
        self._names, self._causes = (spans[column].to_numpy() for column in ("name", "cause"))
        self._began: dict[tuple[str, int], int] = {
            (use, step): began
            for use, step, began in episodes.group_by("use", "step").agg(pl.col("start").min()).iter_rows()
        }
        self._kinds: dict[str, tuple[Ints, Ints, Ints]] = {}
        for kind in LANES:
            own = episodes.filter(pl.col("use") == kind).sort("step", "end", maintain_order=True)
            self._kinds[kind] = (
                own["piece"].to_numpy(),
                own["step"].cast(pl.Int64).to_numpy(),
                own["end"].to_numpy(),
            )
        name = self._names[pieces.span]
        of_process = {
            TRAINER: ([is_trainer(process) for process, _ in lanes], [IDLE]),
            SERVICES: ([process != FLOW for process, _ in lanes], BESIDE_SYNC),
        }
        for kind, (is_held, no_part) in of_process.items():
            held = np.flatnonzero(np.array(is_held, bool)[pieces.lane] & ~np.isin(name, no_part))
            held = held[np.argsort(pieces.end[held], kind="stable")]
            self._kinds[kind] = held, np.zeros(len(held), np.int64), pieces.end[held]

    def begun(self, kind: str, step: int, start: int, end: int) -> int:
        """When those began that the step's line waits for in a stretch: before that, where they went on beside it.

        What was over before the line came to wait for it held nothing up.
        """
        if not len(self._ended(kind, step, start, end)):
            return start
        return min(start, self._began.get((kind, step), start))

    def path(self, kind: str, step: int, start: int, end: int) -> Iterator[Segment]:
        """The path through a stretch in which the step's line waits for these."""
        pieces = self._told(self._ended(kind, step, start, end))
        yield from Walk(pieces, self._lanes_of, self._kin, follows_senders=kind == SERVICES).back(start, end)

    def _ended(self, kind: str, step: int, start: int, end: int) -> Ints:
        """The pieces of these that end in a stretch, by their ends."""
        pieces, steps, ends = self._kinds[kind]
        first, last = np.searchsorted(steps, [step, step + 1]) if kind in LANES else (0, len(pieces))
        bounds = np.searchsorted(ends[first:last], [start, end + CLOCKS_US], side="right")
        return pieces[slice(*(first + bounds))]

    def _told(self, pieces: Ints) -> list[Told]:
        held = self._pieces.take(pieces)
        columns = (pieces, held.lane, held.start, held.end, self._names[held.span], self._causes[held.span])
        return [Told(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _described(
    timeline: Timeline, line: _Line, piece: Ints, cell: Ints, start: Ints, end: Ints
) -> pl.DataFrame:
    """Segments with words: of what was waited for, or of the step's line itself."""
    n, of_line = len(timeline.spans), np.where(line.span[cell] >= 0, line.span[cell], len(timeline.spans))
    of_piece = timeline.pieces.span[np.maximum(piece, 0)] if len(timeline.pieces.span) else piece
    row = pl.Series(np.where(piece >= 0, of_piece, np.where(piece == -1, of_line, n - piece - 1)))
    lanes, names = [LINE, "collect.", "evaluate."], [UNATTRIBUTED, "collect", "evaluate"]  # -1, -2, -3
    nobody = pl.DataFrame({"process": FLOW, "lane": lanes, "name": names, "cause": ""})
    words = pl.concat([timeline.spans.select("process", "lane", "name", "cause"), nobody])
    phase = pl.Series(of_line)
    return pl.DataFrame({"step": line.step[cell], "start": start, "end": end}).hstack(
        [words["name"][phase].alias("phase"), *words[row].get_columns()]
    )
