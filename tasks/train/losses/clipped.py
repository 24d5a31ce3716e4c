"""The clipped policy gradient.

For a token with probability ratio r = pi(token) / mu(token), mu the sampler's policy, and advantage A

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

(Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7; with two bounds:
Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 10.) There is no denominator here: see normalization.
"""

from typing import NamedTuple

import torch


class ClippedLoss(NamedTuple):
    """[N] values of one micro-batch's trained tokens.

    Attributes:
        loss: the loss of each token; the one with a gradient.
        ratio: policy's over sampler's probability.
        clipped: True where the clip stopped the gradient.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def clipped_loss(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> ClippedLoss:
    """The loss of each token, not averaged.

    Args:
        logprobs: [N] nats, the policy's, with a gradient.
        sampler_logprobs: [N] nats, of the same tokens when they were sampled; all finite.
        advantages: [N].
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
    """
    ratio = torch.exp(logprobs - sampler_logprobs)
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return ClippedLoss(-torch.minimum(plain, bounded), ratio.detach(), (bounded < plain).detach())
