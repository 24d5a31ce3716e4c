"""The denominators of the loss, and DeepSpeed's own averaging undone.

The loss of an update is a sum over the trained tokens t of all rows i, of all ranks and micro-batches, of M rows with
n_i trained tokens each:

    token         sum over i, t of loss / (sum over i of n_i)           Yu et al. 2025, "DAPO", arXiv:2503.14476, eq. 8
    sequence      (1 / M) sum over i of (1 / n_i) sum over t of loss    Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300,
                                                                        eq. 3
    fixed_length  (1 / (M L)) sum over i, t of loss                     Liu et al. 2025, "Understanding R1-Zero-Like
                                                                        Training", arXiv:2503.20783, section 3.2; L is
                                                                        `normalization_tokens`

M and the tokens are those of the update on all ranks, so the gradient does not depend on how rows were split over ranks
and micro-batches. Rows without a trained token are none of the M.
"""

import math

import torch
import torch.distributed as dist

from tasks.train.config import TrainConfig
from tasks.train.losses.token_loss import Tokens


def totals(counts: list[tuple[int, int]], device: torch.device) -> list[tuple[int, int]]:
    """Sum pairs of counts (trained tokens, rows), one for each update, over all ranks; a collective, one a step."""
    summed = torch.tensor(counts, dtype=torch.int64, device=device).reshape(-1, 2)
    if dist.is_initialized():
        dist.all_reduce(summed)
    return [(n_tokens, n_rows) for n_tokens, n_rows in summed.tolist()]


def denominator(config: TrainConfig, n_tokens: int, n_rows: int) -> int:
    """What the sum of an update's token losses, each times its `share`, is divided by."""
    if config.normalization == "token":
        return n_tokens
    return n_rows * (config.normalization_tokens if config.normalization == "fixed_length" else 1)


def normalized(config: TrainConfig, loss: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """The sum over a micro-batch of [N] token losses, each times its share of its row; to be divided by the denominator.

    Example: losses 1, 3 and 5 of rows 0, 0 and 1 add up to 9, and with `sequence` to (1 + 3) / 2 + 5 = 7.
    """
    if config.normalization == "sequence":
        return tokens.row_means(loss).sum()
    return loss.sum()


def backward_scale(denominator: int, world_size: int) -> float:
    """What a micro-batch's sum is multiplied by before DeepSpeed's backward pass.

    DeepSpeed divides the sum of the ranks' gradients by their number; the factor W takes that back. The engine
    runs with one accumulation step, so that DeepSpeed divides by nothing else.
    """
    return world_size / denominator


def learning_rate(config: TrainConfig, n_updates: int) -> float:
    """The rate of the update after `n_updates` others: it rises linearly, stays at `lr`, or falls from then on.

    Example: with 3 warm-up updates the first has lr / 3, the third `lr`; with linear decay over 5 updates to a share of 0
    the fourth has `lr`, the fifth lr / 2, and all later ones 0.
    """
    warmup, end = config.warmup_steps, config.lr_decay_updates
    if n_updates < warmup:
        return config.lr * ((n_updates + 1) / warmup)
    if config.lr_decay == "none":
        return config.lr
    done = min(1.0, (n_updates - warmup) / (end - warmup))
    left = 1.0 - done if config.lr_decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_share + (1.0 - config.min_lr_share) * left)
