"""Lay out one step over time: its lane, its critical path, and what each rank and server did."""

from dataclasses import dataclass

import polars as pl

from rollmill.tasks.look.ledger.coverage import measure_coverage
from rollmill.tasks.look.ledger.span_timeline import (
    FLOW,
    LINE,
    SECOND_US,
    UNATTRIBUTED,
    WHOLE,
    Pieces,
    SpanTimeline,
    build_timeline,
    is_trainer,
    overlap,
    process_line,
)

STEP, PATH = "the step", "critical path"
# Most ranks and servers with a lane, so that the chart fits a screen; with more, the first of both kinds, half each.
MOST_PROCESSES = 24
# Most pieces drawn, to keep the page small; the shortest are left out, which are too narrow to be seen.
MOST_PIECES = 4000


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The lanes, and the pieces in them, that a chart of one step draws.

    Attributes:
        lanes: from top to bottom: the step, the critical path, ranks, servers.
        pieces: columns lane, name, cause, start_s (since the step began), seconds; ordered by time.
        n_processes: number of ranks and servers without a lane here.
        n_pieces: number of pieces left out, the shortest ones.
    """

    lanes: list[str]
    pieces: pl.DataFrame
    n_processes: int
    n_pieces: int


def lay_out_step(spans: pl.DataFrame, step: int, path: pl.DataFrame) -> StepTimeline:
    """Compute the lanes and pieces of a step's chart: the step, its critical path `path`, and each rank and server.

    `spans` are rows of the data set, of the step and its neighbours.
    """
    timeline = build_timeline(spans, [step])
    # Ranks by number, then servers: a longer name has a larger number.
    processes = sorted(
        measure_coverage(timeline)["process"], key=lambda each: (not is_trainer(each), len(each), each)
    )
    shown = _limit_processes(processes)
    segments = path.select(
        pl.lit(PATH).alias("lane"),
        "name",
        pl.concat_str("process", "lane", separator=", ").alias("cause"),
        "start",
        "end",
    )
    of_line = timeline.pieces.take(timeline.pieces.lane == timeline.lanes.index((FLOW, LINE)))
    own = _name_pieces(timeline, STEP, of_line).with_columns(pl.col("name").replace(WHOLE, UNATTRIBUTED))
    every = pl.concat(
        [own, segments, *(_name_pieces(timeline, each, process_line(timeline, each)) for each in shown)]
    )
    seconds = (pl.col("end") - pl.col("start")) / SECOND_US
    began = pl.col("start") - pl.col("start").min()
    pieces = every.select(
        "lane", "name", "cause", (began / SECOND_US).alias("start_s"), seconds.alias("seconds")
    )
    longest = pieces.top_k(MOST_PIECES, by="seconds").sort("start_s")
    n_pieces = len(pieces) - len(longest)
    return StepTimeline([STEP, PATH, *shown], longest, len(processes) - len(shown), n_pieces)


def _limit_processes(processes: list[str]) -> list[str]:
    if len(processes) <= MOST_PROCESSES:
        return processes
    ranks = [each for each in processes if is_trainer(each)]
    servers = processes[len(ranks) :]
    n_ranks = min(len(ranks), max(MOST_PROCESSES // 2, MOST_PROCESSES - len(servers)))
    return [*ranks[:n_ranks], *servers[: MOST_PROCESSES - n_ranks]]


def _name_pieces(timeline: SpanTimeline, lane: str, pieces: Pieces) -> pl.DataFrame:
    """Return a lane's pieces within the step's window: columns lane, name, cause, start, end (microseconds)."""
    start, end = (timeline.windows[name].to_numpy() for name in ("start", "end"))
    which, _, begun, ended = overlap(pieces.start, pieces.end, start, end)
    return timeline.spans["name", "cause"][pieces.span[which]].select(
        pl.lit(lane).alias("lane"),
        "name",
        "cause",
        pl.Series("start", begun, pl.Int64),
        pl.Series("end", ended, pl.Int64),
    )
