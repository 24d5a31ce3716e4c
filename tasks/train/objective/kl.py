"""Estimators of KL(pi || reference) from one token that pi has sampled.

With x = log pi(token) - log reference(token) (Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx):

    k1 = x                   unbiased, of either sign
    k2 = x^2 / 2             biased, never below 0
    k3 = exp(-x) - 1 + x     unbiased, never below 0

Those are statements on values. Differentiated, as part of a loss, under pi's own samples: the gradient of k1 is 0 in
expectation; that of k2 is the gradient of KL(pi || reference); that of k3 is the gradient of KL(reference || pi), which is
near the former while the two policies are near each other (Tang and Munos 2025, "On a few pitfalls in KL divergence
gradient estimation for RL", arXiv:2506.09477; Liu et al. 2025, "Rethinking KL Regularization in RLHF", arXiv:2510.01555).
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from rollmill.tasks.train.objective.losses.token_loss import MAX_LOG_RATIO

KLEstimator: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) of each token: [N] nats, x = logprobs - reference_logprobs; unbiased, of either sign."""
    return logprobs - reference_logprobs


def k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) of each token: [N] nats, x^2 / 2, x = logprobs - reference_logprobs; biased, >= 0."""
    return 0.5 * (logprobs - reference_logprobs) ** 2


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) of each token: [N] nats, exp(-x) - 1 + x; unbiased, >= 0.

    x = logprobs - reference_logprobs, at least -20: below, where exp(-x) would soon overflow, the gradient is 0.
    """
    log_ratio = (reference_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(x) - 1 loses when both policies are nearly equal.
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: Mapping[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}
