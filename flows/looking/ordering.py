"""Rows in the order that is asked for."""

from collections.abc import Sequence

import polars as pl

from flows.looking.view import Column
from tasks.errors import ConfigError


def ordered(frame: pl.DataFrame, columns: Sequence[Column], sort: str, limit: int) -> pl.DataFrame:
    """A frame by a column, largest first with - before it, and its first `limit` rows; 0: all.

    NaN and nothing come last. A column may be called as `columns` head it.

    Raises:
        ConfigError: rows cannot be sorted by it; names the columns that they can be sorted by.
    """
    if sort:
        asked = sort.removeprefix("-")
        name = next((each.name for each in columns if each.heading == asked), asked)
        if name not in frame.columns:
            raise ConfigError(
                "--sort",
                sort,
                f"rows can be sorted by {', '.join(frame.columns)}; - before it: largest first",
            )
        key = pl.col(name).fill_nan(None) if frame.schema[name].is_float() else pl.col(name)
        frame = frame.sort(key, descending=sort.startswith("-"), nulls_last=True, maintain_order=True)
    return frame.head(limit) if limit else frame


def cut_notes(n_shown: int, n: int) -> list[str]:
    """What stands below a table that has fewer rows than there are; nothing below one that has all."""
    return [f"{n_shown} of {n}; --limit 0 shows all"] if n_shown < n else []
