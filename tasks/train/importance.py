"""Importance sampling: weights of tokens whose sampler was not the policy that the loss takes them for.

With mu the sampler and p the policy that the loss takes for the sampler (the trainer's before the step where it was
recomputed, else the trained policy itself, without a gradient), the ratio of a token is w = p(token) / mu(token), and on the
level of sequences the product of w over the trained tokens of its row. The token's loss is multiplied by

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

from tasks.train.config import ImportanceConfig
from tasks.train.losses.token_loss import Tokens


class Correction(NamedTuple):
    """[N] of some tokens.

    Attributes:
        weight: what each token's loss is multiplied by; without a gradient.
        masked: True where that is 0.
    """

    weight: torch.Tensor
    masked: torch.Tensor


@torch.no_grad()
def correction(
    config: ImportanceConfig, tokens: Tokens, policy_logprobs: torch.Tensor, *, is_counted: bool
) -> Correction:
    """What the loss of each token is multiplied by.

    Args:
        config: the settings.
        tokens: of some rows, each whole.
        policy_logprobs: [N] nats, those of p.
        is_counted: True when the loss has the ratio to the sampler itself.

    Example: with mode masked, cap 2 and ratios 0.5 and 3 the weights are 0.5 and 0, or 1 and 0 when it is counted.
    """
    log_ratio = policy_logprobs.detach() - tokens.sampler_logprobs
    if config.mode == "none":
        return Correction(torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool))
    if config.level == "sequence":
        log_ratio = tokens.row_sums(log_ratio)[tokens.rows]
    ratio = torch.exp(log_ratio)
    if config.mode == "truncated":
        return Correction(ratio.clamp(max=config.cap), torch.zeros_like(ratio, dtype=torch.bool))
    masked = (ratio < config.floor) | (ratio > config.cap)
    weight = torch.ones_like(ratio) if is_counted else ratio
    return Correction(weight.masked_fill(masked, 0.0), masked)
