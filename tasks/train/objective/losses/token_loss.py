"""Input and output of every loss: the trained tokens of some rows, and the loss of each token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N trained tokens of M rows, with all that a loss needs.

    Attributes:
        logprobs: [N] nats, the policy's, with a gradient.
        old_logprobs: [N] nats, of the policy that the probability ratio is against: the sampler's, or, with
            `train.old_logprobs: trainer`, the trainer's before the step; finite for every loss that has a ratio.
        sampler_logprobs: [N] nats, when the tokens were sampled; NaN where that is not known.
        advantages: [N] advantage of each token.
        rows: [N] int64, index of each token's row among the M; ascending.
        n_rows: number of rows, M.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    rows: torch.Tensor
    n_rows: int

    def row_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the [M] sums of [N] values over the tokens of each row."""
        return values.new_zeros(self.n_rows).index_add(0, self.rows, values)

    def row_means(self, values: torch.Tensor) -> torch.Tensor:
        """Return the [M] means of [N] values over the tokens of each row, each of which has one at least."""
        return self.row_sums(values) / self.row_sums(torch.ones_like(values))


class TokenLoss(NamedTuple):
    """Result of a loss: [N] values of one micro-batch's trained tokens.

    Attributes:
        loss: the loss of each token, not averaged; alone has a gradient. Its denominator: see `normalization.denominator`.
        ratio: the policy's probability of the token over the old policy's.
        weight: what the token's policy gradient is multiplied by to make up for that ratio.
        clipped: True where a bound of the loss applied to the ratio.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    weight: torch.Tensor
    clipped: torch.Tensor


MAX_LOG_RATIO = 20.0
"""Largest absolute logarithm of a probability ratio, in nats; verl has the same. Float32 overflows at 88."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Compute the probability ratio exp(log_ratio), with log_ratio clamped at +-20; NaN stays NaN.

    Beyond the clamp the gradient is 0. Without it the gradient of a clipped token, 0 times an infinite ratio, would be NaN.
    """
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def is_beyond_clamp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return True where `bounded_ratio` clamps the logarithm of a ratio, so that the ratio has no gradient."""
    return log_ratio.detach().abs() > MAX_LOG_RATIO


Loss: TypeAlias = Callable[[Tokens], TokenLoss]
"""A loss: a function of Tokens. A loss of another package without a probability ratio declares `function.has_ratio = False`."""
