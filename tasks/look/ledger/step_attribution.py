"""Assign the seconds of each step, and of a run's start and end, to what used them: by flow, rank, server and trajectory."""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from rollmill.tasks.look.ledger.coverage import count_processes, list_gaps, measure_coverage
from rollmill.tasks.look.ledger.critical_path import find_critical_paths
from rollmill.tasks.look.ledger.server_shares import share_servers
from rollmill.tasks.look.ledger.span_timeline import (
    CONTAINERS,
    FLOW,
    IDLE,
    MAIN,
    NO_SPANS,
    SECOND_US,
    STRAGGLERS,
    UNATTRIBUTED,
    WAIT,
    Ints,
    SpanTimeline,
    build_timeline,
    is_server,
    overlap,
    process_line,
    use_from_lane,
)

TRAJECTORY = r"^\d+\."
"""Prefix of the lanes of a step's trajectories."""
OWN, WHOLE_GROUP = r"^((\d+)\.[^/]+)", r"^(\d+)(?:/(\d+))?$"
"""Patterns of lanes: a trajectory (each scorer may add a suffix), a group, a chunk of a group."""
SAMPLING = "sampling"
KEY = ["step", "group", "attempt"]


def attribute_trajectories(timeline: SpanTimeline) -> pl.DataFrame:
    """Return how many microseconds each trajectory of the timeline's steps spent on what, by name of span.

    Where a trajectory has no span, the span of its group or chunk counts: waiting for the first slot, fetching the problem,
    group scoring, storing, recording in Prefect. While others of its group are sampled it has none.

    Example: a group waits 5 s for a slot, then 0.0 generates for 1 s and 0.1 for 3 s, then the group is scored for 2 s:
    0.0 has 5 s of `waiting_for_server`, 1 s of `generating`, 2 s of `scoring`, and 0.1 has 5, 3 and 2.

    Returns:
        Columns step, lane (GROUP.SAMPLE, for later attempts GROUP.SAMPLE.ATTEMPT), name, us, end (end of its work, in
        microseconds since 1970).
    """
    pieces, of_one = _flow_pieces(timeline), ["step", "lane"]
    # A resumed run does the trajectories of its open step again, in the same lanes: the last attempt counts.
    own = pieces.filter(pl.col("lane").is_not_null()).filter(
        pl.col("attempt") == pl.col("attempt").max().over(of_one)
    )
    own = own.with_columns(id=pl.struct(of_one).rank("dense").cast(pl.Int64))
    keys = own.group_by("id").agg(
        pl.col(*KEY, "lane").first(), first=pl.col("start").min(), last=pl.col("end").max()
    )
    # The lane of a trajectory does not name its chunk; it is the last one of the group that began before it.
    begun = pieces.filter(pl.col("part").is_not_null(), pl.col("name") == SAMPLING)
    parts = begun.group_by(*KEY, "part").agg(first=pl.col("start").min()).sort("first")
    keys = keys.sort("first").join_asof(parts, on="first", by=KEY, check_sortedness=False)
    shared = pieces.filter(pl.col("lane").is_null(), ~pl.col("name").is_in(CONTAINERS)).select(
        *KEY, "name", "start", "end", shared_part="part"
    )
    of_group = keys.select(*KEY, "id", "part").join(shared, on=KEY)
    of_group = of_group.filter(pl.col("shared_part").is_null() | (pl.col("shared_part") == pl.col("part")))
    own, of_group = _separate(own), _separate(of_group)
    us = pl.Series("us", _lengths_without(of_group, own), pl.Int64)
    every = pl.concat(
        [
            own.select("id", "name", us=pl.col("end") - pl.col("start")),
            of_group.select("id", "name", us).filter(pl.col("us") > 0),
        ]
    )
    us_by_name = every.group_by("id", "name").agg(pl.col("us").sum()).sort("id", "name")
    joined = us_by_name.join(keys, on="id", maintain_order="left")
    return joined.select("step", "lane", "name", "us", end="last")


def _flow_pieces(timeline: SpanTimeline) -> pl.DataFrame:
    """Return the flow's pieces that belong to groups and trajectories of the steps with a window.

    Columns: step, attempt, group, part, lane (null for a group), name, start, end.
    """
    lane = pl.col("lane")
    lanes = pl.DataFrame(timeline.lanes, {"process": pl.String, "lane": pl.String}, orient="row").select(
        lane.str.extract(OWN, 1),
        pl.coalesce(lane.str.extract(OWN, 2), lane.str.extract(WHOLE_GROUP, 1)).alias("group"),
        lane.str.extract(WHOLE_GROUP, 2).alias("part"),
        is_held=pl.col("process") == FLOW,
    )
    held = lanes.select(pl.col("is_held") & pl.col("group").is_not_null()).to_series().to_numpy()
    pieces = timeline.pieces.take(held[timeline.pieces.lane])
    words = timeline.spans["step", "attempt", "name"][pieces.span].hstack(
        lanes["lane", "group", "part"][pieces.lane]
    )
    in_hand = pl.col("step").is_in(timeline.windows["step"].unique().to_list())
    return words.with_columns(pl.Series("start", pieces.start), pl.Series("end", pieces.end)).filter(in_hand)


def _separate(pieces: pl.DataFrame) -> pl.DataFrame:
    """Sort each trajectory's pieces by start, and shorten those that overlap an earlier one, as with two concurrent scorers."""
    over = pl.col("end").cum_max().shift(1).over("id")
    in_order = pieces.sort("id", "start", "end")
    return in_order.with_columns(pl.max_horizontal("start", over)).filter(pl.col("end") > pl.col("start"))


def _lengths_without(of_group: pl.DataFrame, own: pl.DataFrame) -> Ints:
    """Return [N], for each row of `of_group`: microseconds not covered by its trajectory's own pieces."""
    every = pl.concat([own.select("start", "end"), of_group.select("start", "end")])
    # `overlap` takes one axis of time: the trajectories are placed on it one behind the other.
    since, until = every.select(pl.col("start").min().fill_null(0), pl.col("end").max().fill_null(0)).row(0)
    bounds = [
        frame[edge].to_numpy() - since + frame["id"].to_numpy() * (until - since)
        for frame in (of_group, own)
        for edge in ("start", "end")
    ]
    which, _, start, end = overlap(*bounds)
    lengths = (of_group["end"] - of_group["start"]).to_numpy().astype(np.int64)
    np.subtract.at(lengths, which, end - start)
    return lengths


def collect_episodes(timeline: SpanTimeline) -> pl.DataFrame:
    """Return the timeline's pieces in lanes of groups, trajectories and evaluations, without spans that enclose others.

    Returns:
        Columns piece (index into the timeline's pieces), step, use (COLLECTING or EVALUATION), lane, name, cause, start, end
        (microseconds since 1970); ordered by start.
    """
    pieces, spans = timeline.pieces, timeline.spans
    lanes = pl.DataFrame(
        {
            "lane": [lane for _, lane in timeline.lanes],
            "use": [use_from_lane(*each) for each in timeline.lanes],
        },
        {"lane": pl.String, "use": pl.String},
    )
    named = lanes[pieces.lane].hstack(spans["step", "name", "cause", "attempt"][pieces.span])
    named = named.with_columns(
        pl.int_range(pl.len()).alias("piece"), pl.Series("start", pieces.start), pl.Series("end", pieces.end)
    )
    own = named.filter((pl.col("use") != "") & ~pl.col("name").is_in(CONTAINERS))
    last = own.filter(pl.col("attempt") == pl.col("attempt").max().over("step"))
    return last.select("piece", "step", "use", "lane", "name", "cause", "start", "end").sort("start", "end")


PARTS = ("start", "end")
"""Spans that enclose all others; time owned only by them is unattributed."""


def attribute_run_ends(rows: pl.DataFrame) -> pl.DataFrame:
    """Return on what the time before the first and after the last step was spent, from rows of `spans`; resumed runs are added up.

    Returns:
        Columns part (`start` or `end`), name, cause, us; the rows of a part sum to its duration, `unattributed` included.
    """
    timeline = build_timeline(rows.filter((pl.col("process") == FLOW) & (pl.col("lane") == MAIN)))
    pieces, spans = timeline.pieces, timeline.spans
    parts = spans.filter(pl.col("name").is_in(PARTS)).sort("start")
    start, end = (parts[name].to_numpy() for name in ("start", "end"))
    piece, part, begun, ended = overlap(pieces.start, pieces.end, start, end)
    name = pl.col("name")
    owned = spans["name", "cause"][pieces.span[piece]].with_columns(
        pl.when(name.is_in(PARTS)).then(pl.lit(UNATTRIBUTED)).otherwise(name).alias("name"),
        parts["name"][part].alias("part"),
        pl.Series("us", ended - begun, dtype=pl.Int64),
    )
    return (
        owned.group_by("part", "name", "cause")
        .agg(pl.col("us").sum())
        .sort(["part", "us", "name", "cause"], descending=[True, True, False, False])
    )


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the time of a run's steps went: which span of which process accounts for how many microseconds.

    Attributes:
        steps: columns step, us; in order. A repeated step counts with its last attempt.
        path: the critical paths; see `find_critical_paths`.
        owners: columns step, process, name, cause, is_other (work for another step than the current one), us, for the ranks
            and servers of the step. The rows of a step and process sum to the step's microseconds exactly, `unattributed`
            and `no_spans` included. For the flow they describe the step lane; a wait has what the critical path did as cause.
        there: columns step, n_servers, n_ranks. A resumed run has servers with other addresses, which did not run together
            with the earlier ones.
        trajectories: columns step, lane, name, us, end; see `attribute_trajectories`.
        episodes: what groups, trajectories and evaluations did; see `collect_episodes`.
        server_shares: what each trajectory used of the servers' time; see `share_servers`.
        ends: columns part (`start`, `end`), name, cause, us; see `attribute_run_ends`.
    """

    steps: pl.DataFrame
    path: pl.DataFrame
    owners: pl.DataFrame
    there: pl.DataFrame
    trajectories: pl.DataFrame
    episodes: pl.DataFrame
    server_shares: pl.DataFrame
    ends: pl.DataFrame


def build_ledger(rows: pl.DataFrame, steps: list[int] | None = None) -> Ledger:
    """Compute from rows of the data set `spans` where the time of `steps` (None: all) went; rows of other steps show overlaps."""
    timeline = build_timeline(rows)
    episodes = collect_episodes(timeline)
    path = find_critical_paths(timeline, episodes)
    # The path of a step may lead into others, which may be dropped only now.
    if steps is not None:
        timeline = replace(timeline, windows=timeline.windows.filter(pl.col("step").is_in(steps)))
        path = path.filter(pl.col("step").is_in(steps))
    whole = (pl.col("end") - pl.col("start")).sum().alias("us")
    lengths = timeline.windows.group_by("step").agg(whole).sort("step")
    owners = pl.concat([_line_owners(path), *_process_owners(timeline, path)])
    reported = measure_coverage(timeline)
    every = pl.concat([owners, *list_gaps(owners, reported, lengths)])
    together = every.group_by(pl.exclude("us")).agg(pl.col("us").sum()).filter(pl.col("us") > 0)
    return Ledger(
        steps=lengths,
        path=path,
        owners=together.sort(
            ["step", "process", "us", "name", "cause"], descending=[False, False, True, False, False]
        ),
        there=count_processes(lengths, reported),
        trajectories=attribute_trajectories(timeline),
        episodes=episodes,
        server_shares=share_servers(timeline, episodes),
        ends=attribute_run_ends(rows),
    )


def median_seconds(frame: pl.DataFrame) -> float:
    """Return the median of a frame's column `us` in seconds; 0 without rows."""
    return float(frame.select(pl.col("us").median() / SECOND_US).item() or 0.0)


def is_work() -> pl.Expr:
    """Return an expression that is True for rows of `owners` in which the process works: no wait, idle or unknown time."""
    name = pl.col("name")
    return ~(name.is_in([IDLE, UNATTRIBUTED, NO_SPANS]) | name.str.starts_with(WAIT))


def _line_owners(path: pl.DataFrame) -> pl.DataFrame:
    """Return rows of owners for the flow's step lane, from the critical path: its own spans, and what its waits were for."""
    is_own = pl.col("phase") == pl.col("name")
    return path.select(
        "step",
        pl.lit(FLOW).alias("process"),
        pl.col("phase").alias("name"),
        pl.when(is_own).then("cause").otherwise("name").alias("cause"),
        is_other=False,
        us=pl.col("end") - pl.col("start"),
    )


def _process_owners(timeline: SpanTimeline, path: pl.DataFrame) -> list[pl.DataFrame]:
    """Return rows of owners for ranks and servers, as several frames; causes of idle time are from the critical path."""
    windows, spans = timeline.windows, timeline.spans
    steps, start, end = (windows[name].to_numpy() for name in ("step", "start", "end"))
    found = []
    for process in sorted({process for process, _ in timeline.lanes} - {FLOW}):
        line = process_line(timeline, process)
        which, window, begun, ended = overlap(line.start, line.end, start, end)
        named = spans["step", "name", "cause"][line.span[which]].with_columns(
            pl.Series("current", steps[window]), pl.Series("start", begun), pl.Series("end", ended)
        )
        owned = named.filter(pl.col("name") != IDLE).select(
            pl.col("current").alias("step"),
            pl.lit(process).alias("process"),
            "name",
            "cause",
            # Work for no step (-1) is not work for another one.
            is_other=(pl.col("step") >= 0) & (pl.col("step") != pl.col("current")),
            us=pl.col("end") - pl.col("start"),
        )
        found += [owned, _idle_owners(named.filter(pl.col("name") == IDLE), process, path)]
    return found


def _idle_owners(pieces: pl.DataFrame, process: str, path: pl.DataFrame) -> pl.DataFrame:
    """Return rows of owners for a process's idle pieces, each with what was on the critical path meanwhile as cause."""
    # That another server generated is what an idle server waited for; a rank waits for any of them.
    elsewhere = (pl.col("name") == "generating") & (pl.col("cause") != process) & (pl.col("cause") != "")
    cause = (
        pl.when(pl.col("phase") == STRAGGLERS)
        .then(pl.lit(STRAGGLERS))
        .when(elsewhere & pl.lit(is_server(process)))
        .then(pl.lit("generating at ") + pl.col("cause"))
        .otherwise("name")
    )
    causes = path.select("step", cause.alias("cause"))
    bounds = [pieces["start"], pieces["end"], path["start"], path["end"]]
    _, segment, start, end = overlap(*(each.to_numpy() for each in bounds))
    return causes[segment].select(
        "step",
        pl.lit(process).alias("process"),
        pl.lit(IDLE).alias("name"),
        "cause",
        is_other=False,
        us=pl.Series(end - start, dtype=pl.Int64),
    )
