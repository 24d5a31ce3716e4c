"""Which ranks and servers were there in each step, and what is not known of their time."""

import polars as pl

from tasks.observe.ledger.timeline import (
    FLOW,
    NO_SPANS,
    RESTART,
    STARTING,
    UNATTRIBUTED,
    Timeline,
    is_trainer,
    overlap,
)


def told_of(timeline: Timeline) -> pl.DataFrame:
    """step, process, us: of the ranks and servers that were there, from the first to the last that they told of the step's time.

    One that died, or was ended with the flow's process, may not have told all: each of its lives has a time of its own, a
    later one from when the flow began to start it again. What the flow saw of it may go on from one into the next.
    """
    again = (pl.col("name") == STARTING) & (pl.col("cause") == RESTART)
    lives = (
        timeline.spans.filter(pl.col("process") != FLOW)
        .sort("start")
        .with_columns(life=again.cum_sum().over("process"))
        .group_by("process", "attempt", "life", maintain_order=True)
        .agg(pl.col("start").min(), pl.col("end").max())
        .with_columns(pl.col("end").cum_max().over("process", "attempt"))
        .with_columns(pl.min_horizontal("end", pl.col("start").shift(-1).over("process")))
    )
    bounds = [frame[edge].to_numpy() for frame in (lives, timeline.windows) for edge in ("start", "end")]
    life, window, start, end = overlap(*bounds)
    told = pl.DataFrame({"step": timeline.windows["step"][window], "process": lives["process"][life]})
    both = told.with_columns(pl.Series("start", start, pl.Int64), pl.Series("end", end, pl.Int64))
    return both.group_by("step", "process").agg(us=(pl.col("end") - pl.col("start")).sum())


def what_is_left(owners: pl.DataFrame, told: pl.DataFrame, lengths: pl.DataFrame) -> list[pl.DataFrame]:
    """Rows of owners for what no span owns: within the time that a process told of, and beside it."""
    known = owners.group_by("step", "process").agg(pl.col("us").sum().alias("known"))
    both = told.join(known, on=["step", "process"], how="left").join(lengths, on="step", suffix="_of_step")
    us = {
        UNATTRIBUTED: pl.col("us") - pl.col("known").fill_null(0),
        NO_SPANS: pl.col("us_of_step") - pl.col("us"),
    }
    return [
        both.select(
            "step", "process", pl.lit(name).alias("name"), pl.lit("").alias("cause"), is_other=False, us=each
        )
        for name, each in us.items()
    ]


def counts(lengths: pl.DataFrame, told: pl.DataFrame) -> pl.DataFrame:
    """step, n_servers, n_ranks: how many of them were there in each step."""
    rank = pl.col("process").map_elements(is_trainer, pl.Boolean)
    found = told.group_by("step").agg(n_servers=(~rank).sum(), n_ranks=rank.sum())
    none = pl.col("n_servers", "n_ranks").fill_null(0).cast(pl.Int64)
    return lengths.select("step").join(found, on="step", how="left", maintain_order="left").with_columns(none)
