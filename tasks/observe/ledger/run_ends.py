"""What a run took beside its steps: its start, up to the first of them, and its end, after the last, by owner."""

import polars as pl

from tasks.observe.ledger.timeline import FLOW, MAIN, UNATTRIBUTED, overlap, timeline_of

PARTS = ("start", "end")
"""Spans around the two; what only they own is unattributed."""


def run_ends(rows: pl.DataFrame) -> pl.DataFrame:
    """Where the time of a run's starts and ends went; a run that was gone on with has several, which are added up.

    Args:
        rows: of the data set `spans`.

    Returns:
        part (`start` or `end`), name, cause, us; those of a part add up to its microseconds, `unattributed` included.
    """
    timeline = timeline_of(rows.filter((pl.col("process") == FLOW) & (pl.col("lane") == MAIN)))
    pieces, spans = timeline.pieces, timeline.spans
    parts = spans.filter(pl.col("name").is_in(PARTS)).sort("start")
    start, end = (parts[name].to_numpy() for name in ("start", "end"))
    piece, part, begun, ended = overlap(pieces.start, pieces.end, start, end)
    name = pl.col("name")
    owned = spans["name", "cause"][pieces.span[piece]].with_columns(
        pl.when(name.is_in(PARTS)).then(pl.lit(UNATTRIBUTED)).otherwise(name).alias("name"),
        parts["name"][part].alias("part"),
        pl.Series("us", ended - begun, dtype=pl.Int64),
    )
    return (
        owned.group_by("part", "name", "cause")
        .agg(pl.col("us").sum())
        .sort(["part", "us", "name", "cause"], descending=[True, True, False, False])
    )
