"""The stored batch of a step: its digest, and a few of its sequences."""

import numpy as np

from tasks.store.digest import batch_digest
from tasks.store.layout import RunFolder
from tasks.store.reader import read, read_trajectories


def stored_digest(folder: RunFolder, step: int) -> str:
    """Digest of the batch that is stored for a step."""
    return batch_digest(read(folder, "batches", step=step))


def stored_sequences(folder: RunFolder, step: int, n: int) -> list[np.ndarray]:
    """[T] int32 token ids of at most `n` trajectories, spread over the step's batch, whichever run sampled them."""
    batch = read(folder, "batches", ["trajectory_id", "source", "source_step"], step=step)
    places = np.linspace(0, batch.num_rows - 1, min(n, batch.num_rows)).astype(int)
    return [_sequence(folder, **row) for row in batch.take(places).to_pylist()]


def _sequence(folder: RunFolder, trajectory_id: str, source: str, source_step: int) -> np.ndarray:
    origin = RunFolder(source) if source else folder
    (row,) = read_trajectories(origin, source_step, [trajectory_id], ["token_ids"])["token_ids"]
    return np.asarray(row.values.to_numpy(), np.int32)
