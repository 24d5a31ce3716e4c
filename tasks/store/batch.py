"""The stored batch of a step: its digest, and a few of its sequences."""

import numpy as np

from tasks.store.digest import batch_digest
from tasks.store.layout import RunFolder
from tasks.store.reader import read, read_trajectories


def stored_digest(folder: RunFolder, step: int) -> str:
    """Digest of the batch that is stored for a step."""
    return batch_digest(read(folder, "batches", step=step))


def stored_sequences(folder: RunFolder, step: int, n: int) -> list[np.ndarray]:
    """[T] int32 token ids of at most `n` trajectories, spread over the step's batch."""
    ids = read(folder, "batches", ["trajectory_id"], step=step)["trajectory_id"].to_pylist()
    chosen = [ids[place] for place in np.linspace(0, len(ids) - 1, min(n, len(ids))).astype(int)]
    rows = read_trajectories(folder, step, chosen, ["token_ids"])["token_ids"]
    return [np.asarray(row.values.to_numpy(), np.int32) for row in rows]
