"""Spans by the attempt at their step: a step that is gone on with after a kill or a cancel has several."""

import polars as pl

from tasks.observe.ledger.timeline import FLOW, LINE, WHOLE, timeline_of


def in_attempts(rows: pl.DataFrame, steps: list[int], *, is_over: bool) -> pl.DataFrame:
    """The spans of steps, each with its attempt, and around each attempt a span `step`.

    An attempt that was killed has none of its own: it is given one, from its first span to its last.

    Args:
        rows: of the data set `spans`, of these steps, of as many before them as may be begun at once, and of the next one.
        steps: those that are wanted.
        is_over: the last attempt is given one too; False: it goes on, and its own is still to come.

    Returns:
        The spans of a timeline with a column `attempt`, from 0 for each step's first; by lane and start, outer ones first.
    """
    spans = timeline_of(rows).spans.rename({"attempt": "nth"})
    told = spans.filter(pl.col("step").is_in(steps))
    told = told.join(_attempts(told), on=["step", "nth"], maintain_order="left")
    is_whole = (pl.col("process") == FLOW) & (pl.col("lane") == LINE) & (pl.col("name") == WHOLE)
    unfinished = told.join(told.filter(is_whole), on=["step", "attempt"], how="anti")
    by = unfinished.group_by("step", "attempt")
    extents = by.agg(pl.col("start").min(), pl.col("end").max(), pl.col("nth").min())
    extents = extents.filter((pl.col("nth") < spans["nth"].max()) | pl.lit(is_over))
    texts = {"process": FLOW, "lane": LINE, "name": WHOLE, "cause": ""}
    around = extents.with_columns(
        *(pl.lit(text).alias(name) for name, text in texts.items()), lane_id=pl.lit(-1)
    )
    return pl.concat([around.select(told.columns).cast(told.schema), told]).drop("nth")


def _attempts(spans: pl.DataFrame) -> pl.DataFrame:
    """step, nth, attempt: a process of which only the trainer did something for a step applied its batch again, no more."""
    by_process = spans.group_by("step", "nth").agg((pl.col("process") == FLOW).any().alias("is_attempt"))
    attempt = (pl.col("is_attempt").cum_sum().over("step").cast(pl.Int64) - 1).clip(0)
    return by_process.sort("step", "nth").select("step", "nth", attempt.alias("attempt"))
