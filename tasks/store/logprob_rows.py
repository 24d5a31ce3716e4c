"""Rows of the data set `logprobs`: log-probabilities by one policy of tokens that another one sampled."""

from collections.abc import Sequence

import numpy as np

from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.schemas import dataset_schema, make_batch, ragged_array


def make_logprob_rows(
    run: str, step: int, models: Sequence[str], ids: Sequence[str], logprobs: Sequence[np.ndarray]
) -> Rows:
    """Build rows of the data set `logprobs`, one per trajectory, for the step that trains on them.

    `models` are the policies that computed `logprobs`: [T] each, in nats, NaN where loss_mask is False.
    """
    n = len(ids)
    columns = {
        "run": [run] * n,
        "step": [step] * n,
        "trajectory_id": list(ids),
        "model": list(models),
        "logprobs": ragged_array(list(logprobs), dataset_schema("logprobs").field("logprobs").type),
    }
    return make_batch("logprobs", columns)


def teacher_identity(model: str) -> str:
    """Return the part of a row's `model` that identifies a teacher: the digest of its weights, or else the whole name.

    Example: "qwen3-8b@0f3c" gives "0f3c", and "policy", the name that a running server gave, gives "policy".
    """
    return model.rpartition("@")[2]


def scatter_to_trained(loss_mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return [T] float32 with `values` at the positions where loss_mask ([T]) is True, NaN elsewhere.

    Example: mask [False, True, True] and values [1, 2] give [NaN, 1, 2].
    """
    row = np.full(len(loss_mask), np.nan, np.float32)
    row[loss_mask] = values
    return row
