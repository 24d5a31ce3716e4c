"""Attempts at a trajectory: their short ids, and which one counts after a failed one was sampled again."""

import polars as pl


def last_attempts(rollouts: pl.LazyFrame) -> pl.LazyFrame:
    """Keep only the last attempt of each (group, sample); needs the columns group, sample and attempt.

    Example: of 5.3.0, which failed, and 5.3.1, which `--redo-failed` sampled again, 5.3.1 is kept.
    """
    return rollouts.filter(pl.col("attempt") == pl.col("attempt").max().over("group", "sample"))


def short_id(trajectory_id: str) -> str:
    """Return a trajectory's id without the run's id, and without the attempt's number if that is 0.

    Example: "6b873bfb6c92961a.12.3.0" is "12.3", its second attempt "12.3.1".
    """
    run, _, place = trajectory_id.partition(".")
    return (
        place.removesuffix(".0")
        if place.count(".") == 2 and run and not place.startswith("v")
        else place or run
    )
