"""Log-probabilities of whole rows under a policy that is not trained on the way."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from tasks.store.logprobs import at_trained
from tasks.train.engine import Forward
from tasks.train.layout import Packer
from tasks.train.micro_batch import MicroBatch
from tasks.train.samples import Samples

RowLogprobs: TypeAlias = dict[int, np.ndarray]
"""[T] float32 nats of some rows by their number, NaN where loss_mask is False."""


class ForwardPolicy(Protocol):
    """What says how likely tokens are.

    Attributes:
        packer: makes its micro-batches.
    """

    packer: Packer

    def forward(self, batch: MicroBatch) -> Forward:
        """What the policy says of the trained tokens of a micro-batch; it may be a collective."""


def row_by_row(rows: Sequence[int], lengths: Sequence[int], n_ranks: int) -> list[list[list[int]]]:
    """[W] micro-batches of one row each, as many on every rank, the missing ones empty; longest rows first.

    Example: rows 0, 1 and 2 of 5, 9 and 7 tokens on two ranks are [[[1], [0]], [[2], []]].
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    n_each = -(-len(ordered) // n_ranks)
    shares = [[[row] for row in ordered[rank::n_ranks]] for rank in range(n_ranks)]
    return [share + [[]] * (n_each - len(share)) for share in shares]


@torch.no_grad()
def row_logprobs(policy: ForwardPolicy, samples: Samples, plan: Sequence[list[int]]) -> RowLogprobs:
    """What a policy says of the rows of a plan, at each row's temperature; every rank gets all ranks' rows, a collective.

    Args:
        policy: says it.
        samples: rows of a batch, or of a part of it.
        plan: this rank's micro-batches, as row numbers; every rank has as many.
    """
    envs, found = sorted(set(samples.envs)), {}
    for rows in plan:
        batch = policy.packer.micro_batch(samples, rows, envs)
        logprobs = policy.forward(batch).logprobs.float().cpu().numpy()
        counts = [int(samples.loss_masks[row].sum()) for row in rows]
        parts = np.split(logprobs, np.cumsum(counts)[:-1]) if rows else []
        for row, values in zip(rows, parts, strict=True):
            found[row] = at_trained(samples.loss_masks[row], values)
    return _of_all_ranks(found)


def _of_all_ranks(found: RowLogprobs) -> RowLogprobs:
    shares: list[RowLogprobs] = [found] * dist.get_world_size()
    if len(shares) > 1:
        dist.all_gather_object(shares, found)
    return {row: values for share in shares for row, values in share.items()}
