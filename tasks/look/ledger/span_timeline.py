"""Turn spans into lanes of disjoint pieces, each with one owner; what lanes are for; the window of each step."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

COLUMNS = ("step", "process", "lane", "name", "cause", "started_at", "duration_s")
"""Columns of the data set `spans` that a timeline needs."""
FLOW, RANK = "flow", "trainer/"
"""Name of the flow's process, and prefix of the ranks; servers are named by address."""
LINE, WHOLE = "step", "step"
"""The flow's step lane, and the name of the span that encloses a step."""
MAIN = "main"
"""Lane of a process that has only one."""
START = "start"
"""Name of the span in lane `main` from the start of a flow process to its first step."""
STARTING, RESTART = "starting", "restart"
"""Name and cause of the span during which the flow relaunches a rank or server that died."""
IDLE, WAIT = "idle", "waiting_"
"""Name of idle time, and prefix of waits."""

UNATTRIBUTED = "unattributed"
"""Name of time without a span, within the time a process reported."""
NO_SPANS = "no_spans"
"""Name of time before the first or after the last span of a rank or server."""

SECOND_US = 1e6

Ints: TypeAlias = npt.NDArray[np.int64]


def is_wait(name: str) -> bool:
    """Return True if a span of this name is idle time or a wait."""
    return name == IDLE or name.startswith(WAIT)


def is_trainer(process: str) -> bool:
    """Return True if this process name, `trainer/RANK`, is that of a rank of the trainer."""
    return process.startswith(RANK)


def is_server(process: str) -> bool:
    """Return True if this process name is that of a vLLM server, which is its address."""
    return process != FLOW and not is_trainer(process)


COLLECTING, EVALUATION = "collecting", "evaluation"
"""Purposes of the flow's lanes: a step's groups and trajectories, and an evaluation."""
LANES = {COLLECTING: r"\d|collect\.", EVALUATION: r"v\d|evaluate\."}
"""Pattern with which the lanes of each purpose begin."""
STRAGGLERS = "waiting_for_stragglers"
CONTAINERS = (IDLE, STRAGGLERS, "collecting", "sampling", "collect", "evaluating")
"""Spans in these lanes that enclose the work of other lanes."""


class LaneFamily(NamedTuple):
    """The group or evaluation that a lane belongs to.

    Attributes:
        family: number of the group, or `v` and the version of the evaluation; empty for neither.
        is_part: True for the lane of a trajectory, and for lanes of ranks and servers.
    """

    family: str
    is_part: bool


def family_from_lane(process: str, lane: str) -> LaneFamily:
    """Return the group or evaluation that a lane belongs to; `family` is empty if it belongs to none."""
    found = re.match(r"(?:evaluate\.|v)(\d+)|(\d+)", lane) if process == FLOW else None
    if found is None:
        return LaneFamily("", is_part=process != FLOW)
    is_part = lane.startswith("v") or bool(re.match(r"\d+\.", lane))
    return LaneFamily(found[0] if found[2] else f"v{found[1]}", is_part)


def use_from_lane(process: str, lane: str) -> str:
    """Return what a lane of the flow is for, COLLECTING or EVALUATION; empty for all other lanes."""
    uses = (use for use, begins in LANES.items() if process == FLOW and re.match(begins, lane))
    return next(uses, "")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Disjoint time intervals, each owned by the innermost span that was open in its lane; ordered by lane and start.

    Example: a span a of [0, 10) that contains a span b of [4, 6) gives the pieces a [0, 4), b [4, 6), a [6, 10).

    Attributes:
        lane: [N] index into the lanes of the timeline.
        span: [N] index into the spans: the innermost open one.
        start: [N] microseconds since 1970.
        end: [N] microseconds since 1970, after `start`.
    """

    lane: Ints
    span: Ints
    start: Ints
    end: Ints

    def take(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice) -> "Pieces":
        """Return the selected pieces, by index, mask or slice."""
        return Pieces(self.lane[which], self.span[which], self.start[which], self.end[which])


@dataclass(frozen=True, slots=True)
class SpanTimeline:
    """The spans of a run, or of some of its steps, with their lanes and the time window of each step.

    Attributes:
        spans: columns step, process, lane, name, cause, lane_id, start, end (microseconds since 1970), attempt (number of
            flow processes of the run that had started before; a resumed run has a new one).
        lanes: (process, lane) by lane_id.
        pieces: the disjoint intervals of all lanes, each with the innermost span that was open.
        windows: columns step, start, end: the time in which a step was current, ordered and disjoint. A step that was
            repeated after a kill or a cancellation has the window of its last attempt.
    """

    spans: pl.DataFrame
    lanes: list[tuple[str, str]]
    pieces: Pieces
    windows: pl.DataFrame


def build_timeline(rows: pl.DataFrame, steps: Iterable[int] | None = None) -> SpanTimeline:
    """Build a timeline from rows with COLUMNS of the data set `spans`, in any order; `steps` get windows (None: all)."""
    start = pl.col("started_at").dt.epoch("us")
    spans = (
        rows.select(COLUMNS)
        .with_columns(
            start.alias("start"), (start + (pl.col("duration_s") * 1e6).round()).cast(pl.Int64).alias("end")
        )
        # Of spans that start together the longest is the outer one.
        .sort("process", "lane", "start", "end", descending=[False, False, False, True])
        .with_columns(pl.struct("process", "lane").rle_id().cast(pl.Int64).alias("lane_id"))
        .drop("started_at", "duration_s")
    )
    # Each flow process of a run begins with a span `start`: their number before a span is the attempt it belongs to.
    begun = spans.filter(process=FLOW, lane=MAIN, name=START)["start"].sort().to_numpy()
    attempt = np.searchsorted(begun, spans["start"].to_numpy(), side="right")
    spans = spans.with_columns(pl.Series("attempt", attempt))
    lanes = spans.unique("lane_id").sort("lane_id").select("process", "lane").rows()
    return SpanTimeline(spans, lanes, _pieces(spans), _step_windows(spans, steps))


def overlap(start: Ints, end: Ints, cell_start: Ints, cell_end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Intersect intervals with cells, which are disjoint intervals ordered by start.

    Returns:
        Index of the interval, index of the cell, start and end of the intersection; one entry for each non-empty one.
    """
    first = np.searchsorted(cell_end, start, side="right")
    n = np.maximum(np.searchsorted(cell_start, end, side="left") - first, 0)
    which = np.repeat(np.arange(len(start)), n)
    cell = np.arange(len(which)) - np.repeat(np.cumsum(n) - n, n) + np.repeat(first, n)
    return which, cell, np.maximum(start[which], cell_start[cell]), np.minimum(end[which], cell_end[cell])


def process_line(timeline: SpanTimeline, process: str) -> Pieces:
    """Merge a process's lanes into one: work precedes waits, waits precede idle time, and lane `main` others of equal rank."""
    lanes = sorted(
        (at for at, (owner, _) in enumerate(timeline.lanes) if owner == process),
        key=lambda at: (timeline.lanes[at][1] != MAIN, at),
    )
    pieces = timeline.pieces
    of_lane = [pieces.take(slice(*np.searchsorted(pieces.lane, [lane, lane + 1]))) for lane in lanes]
    if len(of_lane) == 1:
        return of_lane[0]
    names = timeline.spans["name"]
    edges = np.unique(np.concatenate([*(each.start for each in of_lane), *(each.end for each in of_lane)]))
    best, rank = np.full(len(edges), -1), np.full(len(edges), 3)
    for each in of_lane:
        at = np.searchsorted(each.start, edges, side="right") - 1
        is_open = (at >= 0) & (edges < each.end[at])
        name = names[each.span[at]]
        # Lanes are in order of precedence: of two with equal rank, the earlier one owns the instant.
        own = np.where(name == IDLE, 2, name.str.starts_with(WAIT))
        is_better = is_open & (own < rank)
        best, rank = np.where(is_better, each.span[at], best), np.where(is_better, own, rank)
    held = np.flatnonzero(best >= 0)
    return Pieces(np.full(len(held), lanes[0]), best[held], edges[held], edges[held + 1])


def _pieces(spans: pl.DataFrame) -> Pieces:
    """Compute for each lane and instant the innermost open span, as disjoint pieces.

    After each start and end the nesting depth is known; the innermost span is the one that last raised the depth to it.
    """
    lane, start = spans["lane_id"].to_numpy(), spans["start"].to_numpy()
    end = _uncross_ends(lane, start, spans["end"].to_numpy())
    kept = np.flatnonzero(end > start)
    lane, start, end, n = lane[kept], start[kept], end[kept], len(kept)
    time, opens = np.concatenate([start, end]), np.repeat([True, False], n)
    # Spans are in the order in which they open, outer ones first; it decides between those that open at one time.
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


def _uncross_ends(lane: Ints, start: Ints, end: Ints) -> Ints:
    """Shorten spans that end inside a span which began later, so that spans nest; only rounding causes such spans."""
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


def _step_windows(spans: pl.DataFrame, steps: Iterable[int] | None) -> pl.DataFrame:
    """Return columns step, start and end (microseconds): when each of `steps` (None: all) was current, by its span `step`.

    A step without that span gets the interval from the first start to the last end of its spans in the flow's lane `step`.
    The last attempt of a step counts: a cancelled attempt has a span `step` too.
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
    # Windows are disjoint, so a step begins where those before it have ended.
    ends_before = pl.col("end").cum_max().shift(1)
    return found.with_columns(pl.max_horizontal("start", ends_before)).filter(pl.col("end") > pl.col("start"))
