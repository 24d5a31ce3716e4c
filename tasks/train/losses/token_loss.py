"""What every loss is given and what it gives: the trained tokens of some rows, and the loss of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N trained tokens of M whole rows.

    Attributes:
        logprobs: [N] nats, the policy's, with a gradient.
        old_logprobs: [N] nats, of the policy that the probability ratio is against: the sampler's, or, with
            `train.behaviour: recomputed`, the trainer's before the step; all finite.
        sampler_logprobs: [N] nats, when the tokens were sampled; all finite.
        advantages: [N].
        rows: [N] int64, which of the M rows each token is of; ascending.
        n_rows: M.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    rows: torch.Tensor
    n_rows: int


class TokenLoss(NamedTuple):
    """[N] values of one micro-batch's trained tokens.

    Attributes:
        loss: the loss of each token, not averaged; the one with a gradient. Its denominator: see normalization.
        ratio: policy's over old policy's probability.
        weight: what the token's policy gradient is multiplied by to make up for that ratio.
        clipped: True where a bound of the loss took hold.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    weight: torch.Tensor
    clipped: torch.Tensor


Loss: TypeAlias = Callable[[Tokens], TokenLoss]
