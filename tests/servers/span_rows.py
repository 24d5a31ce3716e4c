"""Spans as rows of the data set, made by hand in seconds."""

from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

BEGAN = datetime(2026, 11, 1, 12, tzinfo=UTC)
Row = tuple[Any, ...]
"""step, process, lane, name, start and end in seconds since BEGAN, cause."""


def spans_of(*rows: Row) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {
                "step": step,
                "process": process,
                "lane": lane,
                "name": name,
                "cause": cause[0] if cause else "",
                "started_at": BEGAN + timedelta(seconds=start),
                "duration_s": end - start,
            }
            for step, process, lane, name, start, end, *cause in rows
        ],
        schema_overrides={
            "step": pl.Int32,
            "started_at": pl.Datetime("us", "UTC"),
            "duration_s": pl.Float64,
        },
    )


def whole_step(step: int = 0, began: float = 0.0) -> list[Row]:
    """Ten seconds: two trajectories through one slot, the second a straggler; of two ranks the second is slow."""
    server = "http://10.0.0.1:8000"
    rows: list[Row] = [
        (step, "flow", "step", "step", 0, 10),
        (step, "flow", "step", "collect", 0, 6),
        (step, "flow", "step", "waiting_for_stragglers", 4, 6),
        (step, "flow", "step", "train", 6.1, 9),
        (step, "flow", "step", "storing", 9.2, 9.9),
        (step, "flow", f"{step}.0", "waiting_for_server", 0, 0.5, "slot"),
        (step, "flow", f"{step}.0", "generating", 0.5, 3, server),
        (step, "flow", f"{step}.0", "scoring", 3, 3.5),
        (step, "flow", f"{step}.1", "waiting_for_server", 0, 3, "slot"),
        (step, "flow", f"{step}.1", "generating", 3, 5.5, server),
        (step, "flow", f"{step}.1", "scoring", 5.5, 5.9),
        (step, server, "main", "idle", 0, 0.5),
        (step, server, "main", "generating", 0.5, 5.5),
        (step, server, "main", "idle", 5.5, 10),
        (step, "trainer/0", "main", "idle", 0, 6.2, "no command"),
        (step, "trainer/0", "main", "forward", 6.2, 7),
        (step, "trainer/0", "main", "waiting_for_rank", 7, 8.5, "trainer/1"),
        (step, "trainer/0", "main", "optimizer", 8.5, 8.9),
        (step, "trainer/0", "main", "idle", 8.9, 10),
        (step, "trainer/1", "main", "idle", 0, 6.2),
        (step, "trainer/1", "main", "forward", 6.2, 8.5),
        (step, "trainer/1", "main", "optimizer", 8.5, 8.8),
    ]
    return [(*row[:4], row[4] + began, row[5] + began, *row[6:]) for row in rows]
