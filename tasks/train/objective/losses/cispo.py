"""The policy gradient with clipped importance weights, which leaves every token with a gradient.

For a token with probability ratio r = pi(token) / mu(token), mu the old policy, and advantage A

    loss = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log pi(token)

With clip_low = 1 and clip_high -> infinity its gradient is that of the expected reward under pi, as far as a token's
own probability goes (the states that it is reached in stay mu's). The upper bound limits the variance; unlike a clip of
the objective it leaves every token with a gradient, however far pi has moved. (MiniMax 2025, "MiniMax-M1",
arXiv:2506.13585, equations 4 and 5; with an upper bound alone the truncated weights of Espeholt et al. 2018, "IMPALA",
arXiv:1802.01561, section 4.2.) There is no denominator here: see normalization.
"""

from rollmill.tasks.train.objective.losses.token_loss import TokenLoss, Tokens, bounded_ratio


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Compute each token's loss: -A log pi(token), times the clipped probability ratio, which has no gradient.

    Args:
        tokens: the trained tokens of some rows.
        clip_low: the ratio is clipped below at 1 - clip_low; with 1 it is not.
        clip_high: the ratio is clipped above at 1 + clip_high.
    """
    ratio = bounded_ratio(tokens.logprobs.detach() - tokens.old_logprobs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, ratio, weight, weight != ratio)
