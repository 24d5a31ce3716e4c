"""The clipped policy gradient with one ratio for a whole answer.

For a row of n trained tokens with advantage A the ratio is the geometric mean of its tokens' ratios,

    s = exp((1 / n) sum over t of (log pi(token_t) - log mu(token_t)))

mu the old policy, and each of its tokens has

    loss_t = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A),   s_t = stop_gradient(s) pi(token_t) /
             stop_gradient(pi(token_t))

whose value is s and whose gradient is s A grad log pi(token_t): the mean of the loss over the row's tokens has the value
and the gradient of -min(s A, clip(s) A). (Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071,
equations 5 and 7, in the form of equations 13 and 14, in which the tokens of a row may have different advantages.) It is meant
for `normalization: sequence`, which takes that mean; the bounds there are 3e-4 and 4e-4, since s is far closer to 1 than a
token's ratio. There is no denominator here: see normalization.
"""

import torch

from rollmill.tasks.train.objective.losses.token_loss import TokenLoss, Tokens, bounded_ratio, is_beyond_clamp


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Compute each token's clipped loss (GSPO) with one probability ratio a row: the geometric mean of its tokens' ratios.

    Args:
        tokens: the trained tokens of some whole rows.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
    """
    log_ratio = tokens.row_means(tokens.logprobs.detach() - tokens.old_logprobs)[tokens.rows]
    ratio, is_clamped = bounded_ratio(log_ratio), is_beyond_clamp(log_ratio)
    # exp of a difference that is 0 is 1, and its gradient that of log pi.
    with_gradient = ratio * torch.exp(tokens.logprobs - tokens.logprobs.detach())
    with_gradient = torch.where(is_clamped, ratio, with_gradient)
    plain = with_gradient * tokens.advantages
    bounded = with_gradient.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    clipped = (bounded < plain).detach() | (is_clamped & (tokens.advantages != 0.0))
    return TokenLoss(-torch.minimum(plain, bounded), ratio, ratio.masked_fill(clipped, 0.0), clipped)
