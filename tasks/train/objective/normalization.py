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

import torch

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.objective.losses.token_loss import Tokens


def denominator(config: TrainConfig, n_tokens: int, n_rows: int) -> int:
    """Return the number that the sum of an update's token losses from `sum_losses` is divided by.

    Args:
        config: settings of training; `normalization` chooses among tokens, rows, and rows times a fixed length.
        n_tokens: trained tokens of the update on all ranks.
        n_rows: rows with a trained token of the update on all ranks.
    """
    if config.normalization == "token":
        return n_tokens
    return n_rows * (config.normalization_tokens if config.normalization == "fixed_length" else 1)


def sum_losses(config: TrainConfig, loss: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Sum [N] token losses over a micro-batch; with normalization `sequence` each divided by the tokens of its row.

    The result is not divided by the denominator yet.

    Example: losses 1, 3 and 5 of rows 0, 0 and 1 add up to 9, and with `sequence` to (1 + 3) / 2 + 5 = 7.
    """
    if config.normalization == "sequence":
        return tokens.row_means(loss).sum()
    return loss.sum()


def backward_scale(denominator: int, world_size: int) -> float:
    """Return the factor of a micro-batch's summed loss before DeepSpeed's backward pass: world_size / denominator.

    DeepSpeed divides the sum of the ranks' gradients by their number; the factor world_size undoes that. The engine
    runs with one accumulation step, so that DeepSpeed divides by nothing else.
    """
    return world_size / denominator
