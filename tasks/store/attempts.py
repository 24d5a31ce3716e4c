"""Which rollouts count where a failed trajectory was sampled again, as a further attempt."""

import polars as pl


def last_attempts(rollouts: pl.LazyFrame) -> pl.LazyFrame:
    """One row of each (group, sample), its last attempt; the columns group, sample and attempt say which that is.

    Example: of 5.3.0, which failed, and 5.3.1, which `--redo-failed` made of it, 5.3.1 is left.
    """
    return rollouts.filter(pl.col("attempt") == pl.col("attempt").max().over("group", "sample"))
