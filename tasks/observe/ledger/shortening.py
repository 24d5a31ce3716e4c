"""What would shorten a step, and by how much at most."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from tasks.observe.ledger.attribution import Ledger, is_work, median_s
from tasks.observe.ledger.critical_path import STRAGGLERS
from tasks.observe.ledger.timeline import FLOW, RANK, is_server

TRAINING = ("packing", "forward", "backward", "optimizer", "annotating")
"""What ranks share between them."""
SENDING = ("gathering", "sending", "receiving", "switching", "sync")


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that takes a part of some work off the critical path.

    Attributes:
        what: in words.
        names: of the work.
        share: of its time that goes.
    """

    what: str
    names: Sequence[str]
    share: float


@dataclass(frozen=True, slots=True)
class Saving:
    """What a remedy saves.

    Attributes:
        remedy: its words.
        seconds: that the median step is shorter by, at most: never more than until something else decides its length.
    """

    remedy: str
    seconds: float


def remedies(n_servers: int) -> list[Remedy]:
    """What may be tried, given how many servers there are."""
    twice = 0.5
    return [
        Remedy("another server", ["generating"], 1 / (n_servers + 1)),
        Remedy("no wait for a server: rollout.max_in_flight, more servers", ["waiting_for_server"], 1.0),
        Remedy("environments twice as fast", ["environment"], twice),
        Remedy("scorers twice as fast", ["scoring"], twice),
        Remedy("no wait for a scorer: score.workers, score.max_in_flight", ["waiting_for_scorer"], 1.0),
        Remedy("twice as many ranks, or as fast ones", TRAINING, twice),
        Remedy("rows balanced over ranks, no slow one", ["waiting_for_rank"], 1.0),
        Remedy("weights sent in no time", SENDING, 1.0),
        Remedy("rows stored in no time", ["storing"], 1.0),
        Remedy("batches handed over in no time", ["handing_over"], 1.0),
        Remedy("evaluation beside the steps", ["evaluate", "evaluating"], 1.0),
        Remedy("checkpoints beside the steps", ["checkpoint", "checkpointing"], 1.0),
        Remedy("nothing told to Prefect", ["recording"], 1.0),
    ]


def savings(ledger: Ledger) -> list[Saving]:
    """What would shorten the median step, the best first; nothing that saves less than a hundredth of it."""
    processes = ledger.owners["process"].unique()
    n_servers = sum(map(is_server, processes))
    found = [Saving(remedy.what, _median(ledger, _saved(ledger, remedy))) for remedy in remedies(n_servers)]
    found.append(Saving("no wait for the last trajectories", _median(ledger, _without_stragglers(ledger))))
    if not ledger.owners["is_other"].any():
        found.append(
            Saving("steps that overlap: rollout.max_staleness: 1", _median(ledger, _overlapping(ledger)))
        )
    least = 0.01 * median_s(ledger.steps)
    return sorted((each for each in found if each.seconds > least), key=lambda each: -each.seconds)


def _median(ledger: Ledger, saved: pl.DataFrame) -> float:
    us = pl.col("saved").fill_null(0).alias("us")
    return median_s(ledger.steps.select("step").join(saved, on="step", how="left").select(us))


def _length() -> pl.Expr:
    return pl.col("end") - pl.col("start")


def _saved(ledger: Ledger, remedy: Remedy) -> pl.DataFrame:
    """step, saved (microseconds): its share of what the path has of this work, but no more than others leave."""
    on_path = ledger.path.filter(pl.col("name").is_in(remedy.names))
    gone = on_path.group_by("step").agg((_length().sum() * remedy.share).alias("gone"))
    bounds = gone.join(_room_of_others(ledger, remedy.names), on="step", how="left").join(
        _room_of_trajectories(ledger, remedy), on="step", how="left"
    )
    return bounds.select(
        "step", pl.min_horizontal("gone", "room", "lane_room").clip(lower_bound=0).alias("saved")
    )


def _room_of_others(ledger: Ledger, names: Sequence[str]) -> pl.DataFrame:
    """step, room: how much shorter a step can be until some process that is not helped has no pause left."""
    helps_servers, helps_trainer = "generating" in names, TRAINING[0] in names
    process = pl.col("process")
    is_rank = process.str.starts_with(RANK)
    is_helped = (pl.lit(helps_servers) & ~is_rank) | (pl.lit(helps_trainer) & is_rank)
    works = ledger.owners.filter((process != FLOW) & is_work() & ~is_helped & ~pl.col("name").is_in(names))
    busy = works.group_by("step", "process").agg(pl.col("us").sum()).group_by("step").agg(pl.col("us").max())
    return ledger.steps.join(busy, on="step", suffix="_busy").select(
        "step", room=pl.col("us") - pl.col("us_busy")
    )


def _room_of_trajectories(ledger: Ledger, remedy: Remedy) -> pl.DataFrame:
    """step, lane_room: how much earlier the last trajectory ends when all have that share less of this work.

    Where they are answered sooner, they wait as much less for a server.
    """
    names = [*remedy.names, "waiting_for_server"] if "generating" in remedy.names else remedy.names
    gone = pl.col("us").filter(pl.col("name").is_in(names)).sum() * remedy.share
    lanes = ledger.trajectories.group_by("step", "lane").agg(pl.col("end").max(), gone.alias("gone"))
    ends = lanes.group_by("step").agg(
        pl.col("gone").sum(), lane_room=pl.col("end").max() - (pl.col("end") - pl.col("gone")).max()
    )
    return ends.filter(pl.col("gone") > 0).select("step", "lane_room")


def _without_stragglers(ledger: Ledger) -> pl.DataFrame:
    waits = ledger.path.filter(pl.col("phase") == STRAGGLERS)
    return waits.group_by("step").agg(_length().sum().alias("saved"))


def _overlapping(ledger: Ledger) -> pl.DataFrame:
    """step, saved: the shorter one of generating and of everything else, once they go on beside each other."""
    collects = pl.col("phase").is_in(["collect", STRAGGLERS])
    both = ledger.path.group_by("step").agg(
        _length().filter(collects).sum().alias("collect"), _length().filter(~collects).sum().alias("rest")
    )
    return both.select("step", saved=pl.min_horizontal("collect", "rest"))
