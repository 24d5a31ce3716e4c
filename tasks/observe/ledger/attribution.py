"""The seconds of each step by their owners: of the step's line, of each rank and of each server."""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from tasks.observe.ledger.critical_path import critical_paths
from tasks.observe.ledger.episodes import episodes_of
from tasks.observe.ledger.lanes import STRAGGLERS
from tasks.observe.ledger.presence import counts, told_of, what_is_left
from tasks.observe.ledger.run_ends import run_ends
from tasks.observe.ledger.timeline import (
    FLOW,
    IDLE,
    MAIN,
    NO_SPANS,
    SECOND_US,
    UNATTRIBUTED,
    WAIT,
    Pieces,
    Timeline,
    is_server,
    overlap,
    timeline_of,
)
from tasks.observe.ledger.trajectories import trajectories_of


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the time of steps went.

    Attributes:
        steps: step, us; in order. Of a step that was tried again, its last attempt.
        path: the critical paths; see `critical_paths`.
        owners: step, process, name, cause, is_other (for another step than the one in hand), us; of the ranks and servers
            that were there in the step. Those of a step and process add up to the step's microseconds exactly, `unattributed`
            and `no_spans` included. Of the flow it is the step's line: the cause of a wait for others is what the critical path
            did there.
        there: step, n_servers, n_ranks: how many there were in each step. A run that is gone on with has servers of other
            addresses, which never were there together with the earlier ones.
        trajectories: step, lane, name, us, end of each trajectory; see `trajectories_of`.
        episodes: what groups, trajectories and evaluations did, of other steps too; see `episodes_of`.
        ends: part (`start`, `end`), name, cause, us: what the run took beside its steps; see `run_ends`.
    """

    steps: pl.DataFrame
    path: pl.DataFrame
    owners: pl.DataFrame
    there: pl.DataFrame
    trajectories: pl.DataFrame
    episodes: pl.DataFrame
    ends: pl.DataFrame


def ledger_of(rows: pl.DataFrame, steps: list[int] | None = None) -> Ledger:
    """Attribute the seconds of steps.

    Args:
        rows: of the data set `spans`.
        steps: those asked for; rows of others say what overlaps them. None: all.
    """
    timeline = timeline_of(rows)
    episodes = episodes_of(timeline)
    path = critical_paths(timeline, episodes)
    if steps is not None:  # what went on in others was needed for the path alone
        timeline = replace(timeline, windows=timeline.windows.filter(pl.col("step").is_in(steps)))
        path = path.filter(pl.col("step").is_in(steps))
    whole = (pl.col("end") - pl.col("start")).sum().alias("us")
    lengths = timeline.windows.group_by("step").agg(whole).sort("step")
    owners = pl.concat([_line_owners(path), *_process_owners(timeline, path)])
    told = told_of(timeline)
    together = (
        pl.concat([owners, *what_is_left(owners, told, lengths)])
        .group_by(pl.exclude("us"))
        .agg(pl.col("us").sum())
    )
    in_order = together.filter(pl.col("us") > 0).sort(
        ["step", "process", "us", "name", "cause"], descending=[False, False, True, False, False]
    )
    there, trajectories = counts(lengths, told), trajectories_of(timeline)
    return Ledger(lengths, path, in_order, there, trajectories, episodes, run_ends(rows))


def median_s(frame: pl.DataFrame) -> float:
    """The median of a frame's microseconds, in seconds; 0 without rows."""
    return float(frame.select(pl.col("us").median() / SECOND_US).item() or 0.0)


def is_work() -> pl.Expr:
    """True for rows of `owners` in which a process does something by itself."""
    name = pl.col("name")
    return ~(name.is_in([IDLE, UNATTRIBUTED, NO_SPANS]) | name.str.starts_with(WAIT))


def _text(value: str, name: str) -> pl.Expr:
    return pl.lit(value, pl.String).alias(name)


def _line_owners(path: pl.DataFrame) -> pl.DataFrame:
    """The step's line: its own names, and for a wait what the path did."""
    is_own = pl.col("phase") == pl.col("name")
    return path.select(
        "step",
        _text(FLOW, "process"),
        pl.col("phase").alias("name"),
        pl.when(is_own).then("cause").otherwise("name").alias("cause"),
        is_other=False,
        us=pl.col("end") - pl.col("start"),
    )


def _process_owners(timeline: Timeline, path: pl.DataFrame) -> list[pl.DataFrame]:
    """Ranks and servers, a frame each."""
    windows, spans = timeline.windows, timeline.spans
    steps, start, end = (windows[name].to_numpy() for name in ("step", "start", "end"))
    found = []
    for process in sorted({process for process, _ in timeline.lanes} - {FLOW}):
        line = line_of(timeline, process)
        which, window, begun, ended = overlap(line.start, line.end, start, end)
        told = spans["step", "name", "cause"][line.span[which]].with_columns(
            pl.Series("in_hand", steps[window]), pl.Series("start", begun), pl.Series("end", ended)
        )
        is_other = (
            (pl.col("step") >= 0) & (pl.col("step") != pl.col("in_hand")) & ~pl.col("name").is_in([IDLE])
        )
        owned = told.filter(pl.col("name") != IDLE).select(
            pl.col("in_hand").alias("step"),
            _text(process, "process"),
            "name",
            "cause",
            is_other=is_other,
            us=pl.col("end") - pl.col("start"),
        )
        found += [owned, _idle(told.filter(pl.col("name") == IDLE), process, path)]
    return found


def _idle(pieces: pl.DataFrame, process: str, path: pl.DataFrame) -> pl.DataFrame:
    """A process's idle time, by what decided the step's length meanwhile."""
    elsewhere = (pl.col("name") == "generating") & (pl.col("cause") != process) & (pl.col("cause") != "")
    cause = (
        pl.when(pl.col("phase") == STRAGGLERS)
        .then(pl.lit(STRAGGLERS))
        .when(elsewhere & pl.lit(is_server(process)))
        .then(pl.lit("generating at ") + pl.col("cause"))
        .otherwise("name")
    )
    told = path.select("step", cause.alias("cause"))
    bounds = [pieces["start"], pieces["end"], path["start"], path["end"]]
    _, segment, start, end = overlap(*(each.to_numpy() for each in bounds))
    return told[segment].select(
        "step",
        _text(process, "process"),
        _text(IDLE, "name"),
        "cause",
        is_other=False,
        us=pl.Series(end - start, dtype=pl.Int64),
    )


def line_of(timeline: Timeline, process: str) -> Pieces:
    """What a process does: where several lanes do something, work goes before waits, waits before idling, `main` first."""
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
        own = np.where(name == IDLE, 2, name.str.starts_with(WAIT))
        is_better = is_open & (own < rank)
        best, rank = np.where(is_better, each.span[at], best), np.where(is_better, own, rank)
    held = np.flatnonzero(best >= 0)
    return Pieces(np.full(len(held), lanes[0]), best[held], edges[held], edges[held + 1])
