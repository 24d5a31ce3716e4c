"""What every loss gives: the loss of each token, and what is measured of it."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch


class TokenLoss(NamedTuple):
    """[N] values of one micro-batch's trained tokens.

    Attributes:
        loss: the loss of each token, not averaged; the one with a gradient. Its denominator: see normalization.
        ratio: policy's over sampler's probability.
        weight: what the token's policy gradient is multiplied by to make up for that ratio.
        clipped: True where a bound of the loss took hold.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    weight: torch.Tensor
    clipped: torch.Tensor


Loss: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], TokenLoss]
"""Takes [N] log-probabilities of the policy, with a gradient, [N] of the sampler, in nats, all finite, and [N]
advantages."""
