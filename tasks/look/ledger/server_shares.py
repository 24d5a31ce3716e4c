"""Share each server's generating seconds among the trajectories that it answered meanwhile."""

import numpy as np
import polars as pl

from rollmill.tasks.look.ledger.span_timeline import (
    Ints,
    SpanTimeline,
    is_server,
    overlap,
    process_line,
)

GENERATING = "generating"


def share_servers(timeline: SpanTimeline, episodes: pl.DataFrame) -> pl.DataFrame:
    """Return the microseconds of servers that each trajectory used within the timeline's windows.

    While a server answers n requests, each has 1 / n of its time. So the shares of a server add up to the time in which it
    generated and a request of a known trajectory was open.

    Example: requests of [0, 4) and [2, 6) on one server: each has 2 + 1 seconds.

    Args:
        timeline: spans with the windows of the steps.
        episodes: requests, of `collect_episodes`.

    Returns:
        Columns step, lane, us (float).
    """
    requests = episodes.filter(pl.col("name") == GENERATING)
    found = [
        _share_server(timeline, process, requests.filter(pl.col("cause") == process))
        for process in sorted({process for process, _ in timeline.lanes if is_server(process)})
    ]
    every = pl.concat([requests.select("step", "lane", us=pl.lit(0.0)).clear(), *found])
    return every.group_by("step", "lane").agg(pl.col("us").sum()).sort("step", "lane")


def _share_server(timeline: SpanTimeline, process: str, requests: pl.DataFrame) -> pl.DataFrame:
    start, end = (requests[edge].to_numpy() for edge in ("start", "end"))
    edges = np.unique(np.concatenate([start, end]))
    opened = np.searchsorted(edges, start), np.searchsorted(edges, end)
    change = np.zeros(max(1, len(edges)), np.int64)
    np.add.at(change, opened[0], 1)
    np.add.at(change, opened[1], -1)
    n_open = np.cumsum(change)[:-1]
    shared = _busy_between(timeline, process, edges) / np.maximum(n_open, 1)
    until = np.concatenate([[0.0], np.cumsum(shared)])
    return requests.select(
        "step", "lane", us=pl.Series(until[opened[1]] - until[opened[0]], dtype=pl.Float64)
    )


def _busy_between(timeline: SpanTimeline, process: str, edges: Ints) -> Ints:
    """Return [len(edges) - 1]: microseconds between two edges in which the server generated and a step was current."""
    line, names = process_line(timeline, process), timeline.spans["name"]
    line = line.take(np.flatnonzero((names == GENERATING).to_numpy()[line.span]))
    window_start, window_end = (timeline.windows[edge].to_numpy() for edge in ("start", "end"))
    _, _, start, end = overlap(line.start, line.end, window_start, window_end)
    order = np.argsort(start)
    cell, _, begun, ended = overlap(edges[:-1], edges[1:], start[order], end[order])
    busy = np.zeros(max(0, len(edges) - 1), np.int64)
    np.add.at(busy, cell, ended - begun)
    return busy
