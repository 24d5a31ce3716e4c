"""A step second by second: its line, its critical path, and what each rank and each server did meanwhile."""

from dataclasses import dataclass

import polars as pl

from tasks.observe.ledger.attribution import line_of
from tasks.observe.ledger.presence import told_of
from tasks.observe.ledger.timeline import (
    FLOW,
    LINE,
    SECOND_US,
    UNATTRIBUTED,
    WHOLE,
    Pieces,
    Timeline,
    is_trainer,
    overlap,
    timeline_of,
)

STEP, PATH = "the step", "critical path"
MOST_PROCESSES = 24
"""Ranks and servers that have a lane; with more of them the first ranks and the first servers, half of the lanes each."""
MOST_PIECES = 4000
"""Of more pieces the longest."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """What was done when.

    Attributes:
        lanes: from the top: the step, the critical path, ranks, servers.
        pieces: lane, name, cause, start_s (since the step began), seconds; in order of time.
        n_processes: ranks and servers that have no lane here.
        n_pieces: pieces that are not here, the shortest.
    """

    lanes: list[str]
    pieces: pl.DataFrame
    n_processes: int
    n_pieces: int


def step_timeline(spans: pl.DataFrame, step: int, path: pl.DataFrame) -> StepTimeline:
    """Lay out a step.

    Args:
        spans: rows of the data set, of the step and of those beside it.
        step: that is laid out.
        path: its critical path, as in a ledger.
    """
    timeline = timeline_of(spans, [step])
    processes = sorted(told_of(timeline)["process"], key=_rank_first)
    shown = _first(processes)
    segments = path.select(
        pl.lit(PATH).alias("lane"),
        "name",
        pl.concat_str("process", "lane", separator=", ").alias("cause"),
        "start",
        "end",
    )
    own = _told(timeline, STEP, _pieces_of_line(timeline)).with_columns(
        pl.col("name").replace(WHOLE, UNATTRIBUTED)
    )
    every = pl.concat([own, segments, *(_told(timeline, each, line_of(timeline, each)) for each in shown)])
    seconds = (pl.col("end") - pl.col("start")) / SECOND_US
    began = pl.col("start") - pl.col("start").min()
    pieces = every.select(
        "lane", "name", "cause", (began / SECOND_US).alias("start_s"), seconds.alias("seconds")
    )
    longest = pieces.top_k(MOST_PIECES, by="seconds").sort("start_s")
    n_pieces = len(pieces) - len(longest)
    return StepTimeline([STEP, PATH, *shown], longest, len(processes) - len(shown), n_pieces)


def _rank_first(process: str) -> tuple[bool, int, str]:
    """Ranks by their number, then servers."""
    return not is_trainer(process), len(process), process


def _first(processes: list[str]) -> list[str]:
    if len(processes) <= MOST_PROCESSES:
        return processes
    ranks = [each for each in processes if is_trainer(each)]
    servers = processes[len(ranks) :]
    n_ranks = min(len(ranks), max(MOST_PROCESSES // 2, MOST_PROCESSES - len(servers)))
    return [*ranks[:n_ranks], *servers[: MOST_PROCESSES - n_ranks]]


def _pieces_of_line(timeline: Timeline) -> Pieces:
    pieces = timeline.pieces
    return pieces.take(pieces.lane == timeline.lanes.index((FLOW, LINE)))


def _told(timeline: Timeline, lane: str, pieces: Pieces) -> pl.DataFrame:
    """Pieces of a lane, as far as they lie in the step."""
    start, end = (timeline.windows[name].to_numpy() for name in ("start", "end"))
    which, _, begun, ended = overlap(pieces.start, pieces.end, start, end)
    return timeline.spans["name", "cause"][pieces.span[which]].select(
        pl.lit(lane).alias("lane"),
        "name",
        "cause",
        pl.Series("start", begun, pl.Int64),
        pl.Series("end", ended, pl.Int64),
    )
