"""Which ranks and servers existed in each step, and which of their time has no spans."""

import polars as pl

from rollmill.tasks.look.ledger.span_timeline import (
    FLOW,
    NO_SPANS,
    RANK,
    RESTART,
    STARTING,
    UNATTRIBUTED,
    SpanTimeline,
    overlap,
)


def measure_coverage(timeline: SpanTimeline) -> pl.DataFrame:
    """Return, for each step and each rank or server, the microseconds for which it reported spans: step, process, us.

    A process that died may not have reported its last spans. Before and after a relaunch it is counted separately; the time
    from its last span to the relaunch is not included.
    """
    # A process that was relaunched keeps its name, but was away between its lives.
    again = (pl.col("name") == STARTING) & (pl.col("cause") == RESTART)
    lives = (
        timeline.spans.filter(pl.col("process") != FLOW)
        .sort("start")
        .with_columns(life=again.cum_sum().over("process"))
        .group_by("process", "attempt", "life", maintain_order=True)
        .agg(pl.col("start").min(), pl.col("end").max())
        # A late span of an earlier life may end in a later one; each microsecond counts once.
        .with_columns(pl.col("end").cum_max().over("process", "attempt"))
        .with_columns(pl.min_horizontal("end", pl.col("start").shift(-1).over("process")))
    )
    bounds = [frame[edge].to_numpy() for frame in (lives, timeline.windows) for edge in ("start", "end")]
    life, window, start, end = overlap(*bounds)
    us = pl.Series("us", end - start, pl.Int64)
    reported = pl.DataFrame([timeline.windows["step"][window], lives["process"][life], us])
    return reported.group_by("step", "process").agg(pl.col("us").sum())


def list_gaps(owners: pl.DataFrame, reported: pl.DataFrame, lengths: pl.DataFrame) -> list[pl.DataFrame]:
    """Return rows of owners for time without a span: `unattributed` within reported time, `no_spans` outside of it.

    `owners` are those of ranks and servers, `reported` is of `measure_coverage`, `lengths` has each step's microseconds (step, us).
    """
    known = owners.group_by("step", "process").agg(pl.col("us").sum().alias("known"))
    both = reported.join(known, on=["step", "process"], how="left").join(
        lengths, on="step", suffix="_of_step"
    )
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


def count_processes(lengths: pl.DataFrame, reported: pl.DataFrame) -> pl.DataFrame:
    """Return columns step, n_servers, n_ranks for the steps of `lengths`; `reported` is of `measure_coverage`."""
    rank = pl.col("process").str.starts_with(RANK)
    found = reported.group_by("step").agg(n_servers=(~rank).sum(), n_ranks=rank.sum())
    none = pl.col("n_servers", "n_ranks").fill_null(0).cast(pl.Int64)
    return lengths.select("step").join(found, on="step", how="left", maintain_order="left").with_columns(none)
