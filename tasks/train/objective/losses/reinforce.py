"""The plain policy gradient.

For a token with advantage A

    loss = -A log pi(token)

(Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", theorem 1;
of whole answers, with a leave-one-out baseline: Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740, equation 7.)
It has no ratio: for tokens that another policy has sampled its gradient is right with an importance correction alone
(see importance). There is no denominator here: see normalization.
"""

import torch

from rollmill.tasks.train.objective.losses.token_loss import TokenLoss, Tokens, bounded_ratio


def reinforce(tokens: Tokens) -> TokenLoss:
    """Compute each token's loss -A log pi(token), A the advantage; the probability ratio is reported, not used."""
    ratio = bounded_ratio(tokens.logprobs.detach() - tokens.old_logprobs)
    weight = torch.ones_like(ratio)
    unclipped = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLoss(-tokens.advantages * tokens.logprobs, ratio, weight, unclipped)
