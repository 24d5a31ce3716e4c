"""Rows of the data set `logprobs`: what a policy says of tokens that another one sampled."""

from collections.abc import Sequence

import numpy as np

from tasks.store.rows import Rows
from tasks.store.schemas import batch_of, ragged, schema_of


def logprob_rows(
    run: str, step: int, models: Sequence[str], ids: Sequence[str], logprobs: Sequence[np.ndarray]
) -> Rows:
    """A row a trajectory.

    Args:
        run: random id of the run.
        step: the step that trains on them.
        models: whose each trajectory's are.
        ids: of the trajectories.
        logprobs: [T] nats of each, NaN where loss_mask is False.
    """
    n = len(ids)
    columns = {
        "run": [run] * n,
        "step": [step] * n,
        "trajectory_id": list(ids),
        "model": list(models),
        "logprobs": ragged(list(logprobs), schema_of("logprobs").field("logprobs").type),
    }
    return batch_of("logprobs", columns)


def at_trained(loss_mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[T] float32: the values of a row's trained tokens at their places, NaN elsewhere.

    Example: mask [False, True, True] and values [1, 2] are [NaN, 1, 2].
    """
    row = np.full(len(loss_mask), np.nan, np.float32)
    row[loss_mask] = values
    return row
