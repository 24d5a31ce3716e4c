"""The clipped policy gradient.

For a token with probability ratio r = pi(token) / mu(token), mu the old policy, and advantage A

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

and with a dual clip c > 1, for A < 0

    loss = -max(min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), c A)

since min alone leaves r A without a bound there. (Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7; with two bounds:
Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 10; dual clip: Ye et al. 2020, "Mastering Complex Control in MOBA Games with
Deep Reinforcement Learning", arXiv:1912.09729, equation 5.) There is no denominator here: see normalization.
"""

import torch

from rollmill.tasks.train.objective.losses.token_loss import TokenLoss, Tokens, bounded_ratio, is_beyond_clamp


def ppo_clip(tokens: Tokens, *, clip_low: float, clip_high: float, clip_dual: float = 0.0) -> TokenLoss:
    """Compute each token's PPO loss: -min(r A, clip(r) A), of probability ratio r and advantage A; optionally with a dual clip.

    Args:
        tokens: the trained tokens of some rows.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
        clip_dual: the loss of a token with a negative advantage is at most clip_dual times -A; 0: not bounded.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    ratio = bounded_ratio(log_ratio)
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    objective, clipped = torch.minimum(plain, bounded), (bounded < plain).detach()
    clipped |= is_beyond_clamp(log_ratio) & (tokens.advantages != 0.0)
    if clip_dual:
        least = torch.where(tokens.advantages < 0.0, clip_dual * tokens.advantages, -torch.inf)
        clipped |= (objective < least).detach()
        objective = torch.maximum(objective, least)
    weight = ratio.detach().masked_fill(clipped, 0.0)
    return TokenLoss(-objective, ratio.detach(), weight, clipped)
