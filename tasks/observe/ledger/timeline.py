"""Spans as lanes of pieces: of each lane, who owns which stretch of time; and the windows of steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

COLUMNS = ("step", "process", "lane", "name", "cause", "started_at", "duration_s")
"""Columns of the data set `spans` that are read here."""
FLOW, RANK = "flow", "trainer/"
"""Processes: the flow, and how the trainer's ranks begin; servers have their addresses."""
LINE, WHOLE = "step", "step"
"""Lane of the steps' line in the flow, and the name of the span around a whole step."""
MAIN = "main"
"""Lane that a process has when it has one."""
START = "start"
"""Name of the span with which each process of the flow begins, in its lane `main`, up to its first step."""
STARTING, RESTART = "starting", "restart"
"""Name and cause of the span of a rank or server that died, while the flow starts it again."""
IDLE, WAIT = "idle", "waiting_"
"""Names of what is no work; the second is how waits begin."""

UNATTRIBUTED = "unattributed"
"""What no span owns."""
NO_SPANS = "no_spans"
"""What lies before the first span of a rank or server, or after its last: it came later, ended, or could not tell it."""

SECOND_US = 1e6

Ints: TypeAlias = npt.NDArray[np.int64]


def is_wait(name: str) -> bool:
    """True for the name of a span in which its process does nothing by itself."""
    return name == IDLE or name.startswith(WAIT)


def is_trainer(process: str) -> bool:
    """True for a rank of the trainer, trainer/RANK."""
    return process.startswith(RANK)


def is_server(process: str) -> bool:
    """True for a server, which is called by its address."""
    return process != FLOW and not is_trainer(process)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of time with one owner each, by lane and start; those of one lane never overlap.

    Example: a span a of [0, 10) with a span b of [4, 6) inside are the pieces a [0, 4), b [4, 6), a [6, 10).

    Attributes:
        lane: [N] index into the lanes of the timeline.
        span: [N] index into its spans: the innermost that is open.
        start: [N] microseconds since 1970.
        end: [N] the same; after the start.
    """

    lane: Ints
    span: Ints
    start: Ints
    end: Ints

    def take(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice) -> "Pieces":
        """Some of them, by index, mask or slice."""
        return Pieces(self.lane[which], self.span[which], self.start[which], self.end[which])


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of a run, or of some of its steps.

    Attributes:
        spans: step, process, lane, name, cause, lane_id, start, end (microseconds since 1970), attempt (how many processes
            of the flow had begun when it did: a run that is gone on with has another one).
        lanes: (process, lane) by lane_id.
        pieces: of all lanes.
        windows: step, start, end: when a step was in hand, in order of time and disjoint. One that was tried again, after its
            process was killed or cancelled, has that of its last attempt.
    """

    spans: pl.DataFrame
    lanes: list[tuple[str, str]]
    pieces: Pieces
    windows: pl.DataFrame


def timeline_of(rows: pl.DataFrame, steps: Iterable[int] | None = None) -> Timeline:
    """Put spans in order.

    Args:
        rows: of the data set `spans`, with COLUMNS, in any order.
        steps: those that have windows; None: all.
    """
    start = pl.col("started_at").dt.epoch("us")
    spans = (
        rows.select(COLUMNS)
        .with_columns(
            start.alias("start"), (start + (pl.col("duration_s") * 1e6).round()).cast(pl.Int64).alias("end")
        )
        .sort("process", "lane", "start", "end", descending=[False, False, False, True])
        .with_columns(pl.struct("process", "lane").rle_id().cast(pl.Int64).alias("lane_id"))
        .drop("started_at", "duration_s")
    )
    begun = spans.filter(process=FLOW, lane=MAIN, name=START)["start"].sort().to_numpy()
    attempt = np.searchsorted(begun, spans["start"].to_numpy(), side="right")
    spans = spans.with_columns(pl.Series("attempt", attempt))
    lanes = spans.unique("lane_id").sort("lane_id").select("process", "lane").rows()
    return Timeline(spans, lanes, _pieces(spans), _windows(spans, steps))


def overlap(start: Ints, end: Ints, cell_start: Ints, cell_end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Where intervals lie in cells, which are disjoint and in order.

    Returns:
        Index of the interval, index of the cell, start and end of what they share; one for each pair that shares some.
    """
    first = np.searchsorted(cell_end, start, side="right")
    n = np.maximum(np.searchsorted(cell_start, end, side="left") - first, 0)
    which = np.repeat(np.arange(len(start)), n)
    cell = np.arange(len(which)) - np.repeat(np.cumsum(n) - n, n) + np.repeat(first, n)
    return which, cell, np.maximum(start[which], cell_start[cell]), np.minimum(end[which], cell_end[cell])


def _pieces(spans: pl.DataFrame) -> Pieces:
    """The innermost span of each lane at each instant, where one is open.

    After every start and every end, as many spans are open as the depth says, and the innermost is the one that was
    last to raise the depth to that.
    """
    lane, start = spans["lane_id"].to_numpy(), spans["start"].to_numpy()
    end = _uncrossed(lane, start, spans["end"].to_numpy())
    kept = np.flatnonzero(end > start)
    lane, start, end, n = lane[kept], start[kept], end[kept], len(kept)
    time, opens = np.concatenate([start, end]), np.repeat([True, False], n)
    # spans lie in the order in which they open, outer ones first: of what opens at one time that order decides
    order = np.lexsort((np.concatenate([np.arange(n), np.zeros(n, np.int64)]), opens, time, np.tile(lane, 2)))
    time, opens = time[order], opens[order]
    depth = np.cumsum(np.where(opens, 1, -1))
    by_depth = np.argsort(depth, kind="stable")
    last_opened = np.maximum.accumulate(np.where(opens[by_depth], np.arange(2 * n), 0))
    owner = np.empty(2 * n, np.int64)
    owner[by_depth] = order[by_depth[last_opened]] if n else owner
    until = np.append(time[1:], 0)
    held = np.flatnonzero((depth > 0) & (until > time))
    return Pieces(lane[owner[held]], kept[owner[held]], time[held], until[held])


def _uncrossed(lane: Ints, start: Ints, end: Ints) -> Ints:
    """The ends of spans, those brought forward that end inside a span which began later: it has the time from there.

    Of a lane that is one line of control, such are only those whose times were rounded.
    """
    ends = end.tolist()
    opened: list[int] = []
    before = -1
    for at, (each, begun, ended) in enumerate(zip(lane.tolist(), start.tolist(), end.tolist(), strict=True)):
        opened = [] if each != before else [other for other in opened if ends[other] > begun]
        before = each
        for other in opened:
            if ends[other] < ended:
                ends[other] = begun
        opened.append(at)
    return np.array(ends, np.int64)


def _windows(spans: pl.DataFrame, steps: Iterable[int] | None) -> pl.DataFrame:
    """By the spans around whole steps; a step that has none yet goes from its line's first span to its last.

    Of each step's line the last attempt counts: one that was cancelled has a whole step's span too.
    """
    line = spans.filter(
        (pl.col("process") == FLOW) & (pl.col("lane") == LINE) & (pl.col("step") >= 0),
        pl.col("attempt") == pl.col("attempt").max().over("step", "process", "lane"),
    )
    if steps is not None:
        line = line.filter(pl.col("step").is_in(list(steps)))
    whole = line.filter(pl.col("name") == WHOLE).select("step", "start", "end")
    open_ones = line.join(whole, on="step", how="anti").group_by("step")
    extents = open_ones.agg(pl.col("start").min(), pl.col("end").max())
    found = pl.concat([whole, extents]).sort("start")
    ends_before = pl.col("end").cum_max().shift(1)
    return found.with_columns(pl.max_horizontal("start", ends_before)).filter(pl.col("end") > pl.col("start"))
