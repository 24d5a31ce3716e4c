"""The policy gradient with truncated importance weights, for rows that other policies sampled.

For a token with probability ratio r = pi(token) / mu(token), mu the sampler's policy, and advantage A

    loss = -stop_gradient(min(r, cap)) A log pi(token)

Its gradient is min(r, cap) A grad log pi: with cap -> infinity that of the expected reward under pi, as far as a
token's own probability goes (the states that it is reached in stay mu's). The cap bounds the variance; unlike a clip
of the ratio it leaves every token with a gradient, however far pi has moved. (Espeholt et al. 2018, "IMPALA",
arXiv:1802.01561, section 4.2: the policy gradient with rho_s = min(rho-bar, pi / mu); in the form of a loss for
language models: MiniMax 2025, "MiniMax-M1", arXiv:2506.13585, CISPO, equation 4, with an upper bound alone.) There is
no denominator here: see normalization.
"""

import torch

from tasks.train.losses.token_loss import TokenLoss


def truncated_loss(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    cap: float,
) -> TokenLoss:
    """The loss of each token, not averaged.

    Args:
        logprobs: [N] nats, the policy's, with a gradient.
        sampler_logprobs: [N] nats, of the same tokens when they were sampled; all finite.
        advantages: [N].
        cap: the largest weight.
    """
    ratio = torch.exp(logprobs.detach() - sampler_logprobs)
    weight = ratio.clamp(max=cap)
    return TokenLoss(-weight * advantages * logprobs, ratio, weight, ratio > cap)
