"""Importance sampling: weights for tokens that another policy has sampled than the one that the loss assumes.

With mu the sampler and p the policy that the loss takes for the sampler (the trainer's before the step where it was
recomputed, else the trained policy itself, without a gradient), the ratio of a token is w = p(token) / mu(token), and on the
level of sequences the product of w over the trained tokens of its row, or with `sequence_mean` their geometric mean. With (floor, cap) = `bounds` the
token's loss is multiplied by

    truncated   min(w, cap)
    masked      w where floor <= w <= cap, else 0

(Truncated: Espeholt et al. 2018, "IMPALA", arXiv:1802.01561, section 4.1; for the mismatch of a sampler with its trainer
Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Masked: Ling Team 2025, "Every
Step Evolves", arXiv:2510.18855, IcePop; with floor 0, and on the level of sequences, Liu et al. 2025, "When Speed Kills
Stability".) A loss that has the ratio to the sampler itself is masked by 1 and 0 instead, since it would count w twice. A
masked token counts in the denominator of the loss, as in IcePop's; verl leaves it out there.
"""

from typing import NamedTuple

import torch

from rollmill.tasks.train.config import ImportanceConfig
from rollmill.tasks.train.objective.losses.token_loss import Tokens


class ImportanceWeights(NamedTuple):
    """Factors that multiply the losses of N tokens, and which tokens are masked.

    Attributes:
        weight: [N] factors of the tokens' losses, without a gradient.
        masked: [N] True where mode masked has set the weight to 0.
    """

    weight: torch.Tensor
    masked: torch.Tensor


@torch.no_grad()
def importance_weights(
    config: ImportanceConfig, tokens: Tokens, policy_logprobs: torch.Tensor, *, has_sampler_ratio: bool
) -> ImportanceWeights:
    """Compute the [N] factors that correct each token's loss for having been sampled by another policy.

    Args:
        config: the settings.
        tokens: the trained tokens of some whole rows.
        policy_logprobs: [N] nats, of the policy that the loss assumes to have sampled the tokens; over the sampler's they give
            the ratio.
        has_sampler_ratio: True when the loss already multiplies by the ratio to the sampler.

    Example: with mode masked, cap 2 and ratios 0.5 and 3 the weights are 0.5 and 0, or with `has_sampler_ratio` 1 and 0.
    """
    log_ratio = policy_logprobs.detach() - tokens.sampler_logprobs
    if config.mode == "none":
        return ImportanceWeights(torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool))
    if config.level == "sequence":
        log_ratio = tokens.row_sums(log_ratio)[tokens.rows]
    elif config.level == "sequence_mean":
        log_ratio = tokens.row_means(log_ratio)[tokens.rows]
    ratio, (floor, cap) = torch.exp(log_ratio), config.bounds
    if config.mode == "truncated":
        return ImportanceWeights(ratio.clamp(max=cap), torch.zeros_like(ratio, dtype=torch.bool))
    masked = (ratio < floor) | (ratio > cap)
    # A loss with the ratio to the sampler is multiplied by it already, and would count it twice.
    weight = torch.ones_like(ratio) if has_sampler_ratio else ratio
    return ImportanceWeights(weight.masked_fill(masked, 0.0), masked)
