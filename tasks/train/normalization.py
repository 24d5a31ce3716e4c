"""The denominator of the loss: the trained tokens of the whole global batch.

The loss of an update is (sum over the tokens of all ranks and micro-batches) / N, with N the trained tokens of
that update on all ranks. So the gradient does not depend on how rows were split over ranks and micro-batches.
"""

import torch
import torch.distributed as dist


def trained_tokens(counts: list[int], device: torch.device) -> list[int]:
    """Sum integer counts, one for each update, over all ranks; a collective, one a step."""
    totals = torch.tensor(counts, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return [int(total) for total in totals.tolist()]


def backward_scale(n_tokens: int, world_size: int) -> float:
    """What a micro-batch's sum of token losses is multiplied by before DeepSpeed's backward pass.

    DeepSpeed divides the sum of the ranks' gradients by their number; the factor W takes that back. The engine
    runs with one accumulation step, so that DeepSpeed divides by nothing else.
    """
    return world_size / n_tokens


def learning_rate(peak: float, n_updates: int, warmup_updates: int) -> float:
    """The rate of the update after `n_updates` others: it rises linearly to `peak` over the first ones.

    Example: with 3 warm-up updates the first has peak / 3, the third and all later ones have `peak`.
    """
    return peak * min(1.0, (n_updates + 1) / warmup_updates) if warmup_updates else peak
