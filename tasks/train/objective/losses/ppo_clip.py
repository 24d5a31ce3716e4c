"""The clipped policy gradient.

For a token with probability ratio r = pi(token) / mu(token), mu the old policy, and advantage A

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

(Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7; with two bounds:
Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 10.) There is no denominator here: see normalization.
"""

import torch

from rollmill.tasks.train.objective.losses.token_loss import TokenLoss, Tokens


def ppo_clip(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Compute each token's PPO loss: -min(r A, clip(r) A), of probability ratio r and advantage A.

    Args:
        tokens: the trained tokens of some rows.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
    """
    ratio = torch.exp(tokens.logprobs - tokens.old_logprobs)
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    clipped = (bounded < plain).detach()
    weight = ratio.detach().masked_fill(clipped, 0.0)
    return TokenLoss(-torch.minimum(plain, bounded), ratio.detach(), weight, clipped)
