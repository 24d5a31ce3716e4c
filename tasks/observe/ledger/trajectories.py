"""Where the time of each trajectory went: what it did itself, and what its group or its part did for it meanwhile."""

import numpy as np
import polars as pl

from tasks.observe.ledger.lanes import CONTAINERS
from tasks.observe.ledger.timeline import FLOW, Ints, Timeline, overlap

TRAJECTORY = r"^\d+\."
"""How the lanes of a step's trajectories begin."""
OWN, WHOLE_GROUP = r"^((\d+)\.[^/]+)", r"^(\d+)(?:/(\d+))?$"
"""Lanes: of a trajectory, to which each of its scorers may add one; of a group, and of a part of one."""
SAMPLING = "sampling"
KEY = ["step", "group", "attempt"]


def trajectories_of(timeline: Timeline) -> pl.DataFrame:
    """The seconds of the trajectories of the steps in hand.

    Where a trajectory has no span of its own, its group's or its part's counts: a wait for their first slot, the problem, a
    scorer of groups, storing, what Prefect is told. While others of the group are sampled it has none. One that was begun
    again after the flow's process had ended has the time of its last attempt.

    Example: a group waits 5 s for a slot, then 0.0 generates for 1 s and 0.1 for 3 s, then the group is scored for 2 s:
    0.0 has 5 s of `waiting_for_server`, 1 s of `generating`, 2 s of `scoring`, and 0.1 has 5, 3 and 2.

    Returns:
        step, lane (GROUP.SAMPLE, of later attempts GROUP.SAMPLE.ATTEMPT), name, us, end (when what it did itself was over,
        in microseconds since 1970).
    """
    pieces = _pieces_of_flow(timeline)
    own = _own(pieces)
    keys = own.group_by("id").agg(
        pl.col(*KEY, "lane").first(), first=pl.col("start").min(), last=pl.col("end").max()
    )
    of_group = _of_group(pieces, _with_part(keys, pieces))
    own, of_group = _apart(own), _apart(of_group)
    us = _lengths_beside(of_group, own)
    every = pl.concat(
        [
            own.select("id", "name", us=pl.col("end") - pl.col("start")),
            of_group.select("id", "name", pl.Series("us", us, pl.Int64)).filter(pl.col("us") > 0),
        ]
    )
    return (
        every.group_by("id", "name")
        .agg(pl.col("us").sum())
        .sort("id", "name")
        .join(keys, on="id", maintain_order="left")
        .select("step", "lane", "name", "us", end="last")
    )


def _pieces_of_flow(timeline: Timeline) -> pl.DataFrame:
    """step, attempt, group, part, lane (of a trajectory; null of a group), name, start, end; of steps in hand."""
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


def _own(pieces: pl.DataFrame) -> pl.DataFrame:
    """The pieces of trajectories, of the last attempt of each, numbered by step and lane (`id`)."""
    own = pieces.filter(pl.col("lane").is_not_null())
    of_one = ["step", "lane"]
    last = pl.col("attempt") == pl.col("attempt").max().over(of_one)
    return own.filter(last).with_columns(pl.struct(of_one).rank("dense").cast(pl.Int64).alias("id"))


def _with_part(keys: pl.DataFrame, pieces: pl.DataFrame) -> pl.DataFrame:
    """Which part of its group each trajectory belongs to, where there are several: the last one that began until it did."""
    begun = pieces.filter(pl.col("part").is_not_null(), pl.col("name") == SAMPLING)
    parts = begun.group_by(*KEY, "part").agg(first=pl.col("start").min()).sort("first")
    return keys.sort("first").join_asof(parts, on="first", by=KEY, check_sortedness=False)


def _of_group(pieces: pl.DataFrame, keys: pl.DataFrame) -> pl.DataFrame:
    """Of each trajectory, the pieces of its group and of its part that are not around what others do."""
    shared = pieces.filter(pl.col("lane").is_null(), ~pl.col("name").is_in(CONTAINERS)).select(
        *KEY, "name", "start", "end", shared_part="part"
    )
    both = keys.select(*KEY, "id", "part").join(shared, on=KEY)
    return both.filter(pl.col("shared_part").is_null() | (pl.col("shared_part") == pl.col("part")))


def _apart(pieces: pl.DataFrame) -> pl.DataFrame:
    """Each trajectory's pieces in order, those cut that begin before an earlier one is over: two scorers at once, say."""
    over = pl.col("end").cum_max().shift(1).over("id")
    in_order = pieces.sort("id", "start", "end")
    return in_order.with_columns(pl.max_horizontal("start", over)).filter(pl.col("end") > pl.col("start"))


def _lengths_beside(of_group: pl.DataFrame, own: pl.DataFrame) -> Ints:
    """[N] microseconds of each piece of a group in which its trajectory has none of its own."""
    every = pl.concat([own.select("start", "end"), of_group.select("start", "end")])
    # one trajectory behind the other on one axis, so that all are looked at in one go
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
