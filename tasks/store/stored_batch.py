"""The stored batch of a step: its digest, which is equal for equal batches on every machine, and a few of its sequences."""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read, read_trajectories

_NUMBER_COLUMNS = {"order": "<i4", "advantage": "<f4", "source_step": "<i4"}
_TEXT_COLUMNS = ("trajectory_id", "source")


def batch_digest(rows: pa.Table) -> str:
    """Compute the SHA-256 of what the trainer trains on, 64 hex digits; independent of the rows' order and chunks.

    It covers the columns order, trajectory_id, advantage (bit for bit), source and source_step of `batches`, and token_advantages
    (bit for bit) if a row has any.
    """
    rows = rows.sort_by("order")
    digest = hashlib.sha256(f"{rows.num_rows} rows".encode())
    for name, kind in _NUMBER_COLUMNS.items():
        digest.update(np.asarray(rows[name].to_numpy(), kind).tobytes())
    for name in _TEXT_COLUMNS:
        digest.update(json.dumps(rows[name].to_pylist()).encode())
    counts = pc.list_value_length(rows["token_advantages"]).to_numpy()
    if counts.any():
        digest.update(np.asarray(counts, "<i8").tobytes())
        digest.update(np.asarray(pc.list_flatten(rows["token_advantages"]).to_numpy(), "<f4").tobytes())
    return digest.hexdigest()


def read_batch_digest(folder: RunFolder, step: int) -> str:
    """Read the stored batch of a step and compute its digest, 64 hex digits; see `batch_digest`."""
    return batch_digest(read(folder, "batches", step=step))


def select_own_rows(batches: pl.LazyFrame) -> pl.LazyFrame:
    """Select the rows of `batches` whose trajectories the step itself sampled, at most one for each trajectory of the run.

    Other rows are of stored groups, whose trajectories may be in several batches.
    """
    return batches.filter((pl.col("source") == "") & (pl.col("source_step") == pl.col("step")))


def list_origins(folder: RunFolder, step: int) -> list[tuple[RunFolder, int, list[str]]]:
    """List where the trajectories of a step's batch were sampled: each run and step, with their ids."""
    rows = read(folder, "batches", ["trajectory_id", "source", "source_step"], step=step).to_pylist()
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        found.setdefault((row["source"], row["source_step"]), []).append(row["trajectory_id"])
    return [
        (RunFolder(source) if source else folder, source_step, ids)
        for (source, source_step), ids in found.items()
    ]


def read_batch_sequences(folder: RunFolder, step: int, n: int) -> list[np.ndarray]:
    """Read the token ids, [T] int32 each, of at most `n` trajectories that are evenly spread over the batch of a step.

    Of a trajectory of several segments they are those of the first one. They are read from the runs that sampled them.
    """
    batch = read(folder, "batches", ["trajectory_id", "source", "source_step"], step=step)
    places = np.linspace(0, batch.num_rows - 1, min(n, batch.num_rows)).astype(int)
    chosen = [tuple(row.values()) for row in batch.take(places).to_pylist()]
    origins = {(source, source_step) for _, source, source_step in chosen}
    found = {
        origin: _sequences(folder, *origin, [row[0] for row in chosen if row[1:] == origin])
        for origin in origins
    }
    return [found[row[1:]][row[0]] for row in chosen]


def _sequences(folder: RunFolder, source: str, step: int, ids: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the [T] int32 token ids of trajectories of one step, by id; an empty `source` is the run in `folder`."""
    columns = ["token_ids", "segment_starts"]
    rows = read_trajectories(RunFolder(source) if source else folder, step, ids, columns)
    found = {}
    for each, tokens, starts in zip(ids, rows["token_ids"], rows["segment_starts"].to_pylist(), strict=True):
        end = starts[1] if len(starts) > 1 else None
        found[each] = np.asarray(tokens.values.to_numpy()[:end], np.int32)
    return found
