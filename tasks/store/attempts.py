"""Attempts at a trajectory: how each is called, and which counts where one failed and was sampled again."""

import polars as pl


def last_attempts(rollouts: pl.LazyFrame) -> pl.LazyFrame:
    """One row of each (group, sample), its last attempt; the columns group, sample and attempt say which that is.

    Example: of 5.3.0, which failed, and 5.3.1, which `--redo-failed` made of it, 5.3.1 is left.
    """
    return rollouts.filter(pl.col("attempt") == pl.col("attempt").max().over("group", "sample"))


def short_id(trajectory_id: str) -> str:
    """A trajectory's id without its run's, and without its attempt where it is the first.

    Example: "6b873bfb6c92961a.12.3.0" is "12.3", its second attempt "12.3.1".
    """
    run, _, place = trajectory_id.partition(".")
    return (
        place.removesuffix(".0")
        if place.count(".") == 2 and run and not place.startswith("v")
        else place or run
    )
