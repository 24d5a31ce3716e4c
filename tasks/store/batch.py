"""The stored batch of a step: its digest, and a few of its sequences."""

from collections.abc import Sequence

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
    chosen = [tuple(row.values()) for row in batch.take(places).to_pylist()]
    origins = {(source, source_step) for _, source, source_step in chosen}
    found = {
        origin: _sequences(folder, *origin, [row[0] for row in chosen if row[1:] == origin])
        for origin in origins
    }
    return [found[row[1:]][row[0]] for row in chosen]


def _sequences(folder: RunFolder, source: str, step: int, ids: Sequence[str]) -> dict[str, np.ndarray]:
    """Token ids by trajectory id: the rows of the step are read once, however many are asked for."""
    rows = read_trajectories(RunFolder(source) if source else folder, step, ids, ["token_ids"])["token_ids"]
    return {each: np.asarray(row.values.to_numpy(), np.int32) for each, row in zip(ids, rows, strict=True)}
