"""Rows in the order that is asked for."""

import polars as pl

from tasks.errors import ConfigError


def ordered(frame: pl.DataFrame, sort: str, limit: int) -> pl.DataFrame:
    """A frame by a column, largest first with - before it, and its first `limit` rows; 0: all."""
    if sort:
        name = sort.removeprefix("-")
        if name not in frame.columns:
            raise ConfigError(
                "--sort", sort, f"there is no such column; there are {', '.join(frame.columns)}"
            )
        key = pl.col(name).fill_nan(None) if frame.schema[name].is_float() else pl.col(name)
        frame = frame.sort(key, descending=sort.startswith("-"), nulls_last=True, maintain_order=True)
    return frame.head(limit) if limit else frame
