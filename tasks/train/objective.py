"""What is minimized for a token, not averaged yet.

    weight loss(A) + kl.coef k - entropy_coef H

with `loss` the policy's (see losses), `weight` the importance correction (see importance), k an estimator of the
divergence from the reference policy (see divergence) and H the entropy of the policy's distribution of the token. With
`kl.place: advantage` the divergence is in the advantage instead, without a gradient: A - kl.coef k for A. The average
over tokens is that of normalization.
"""

from dataclasses import dataclass, replace

import torch

from tasks.errors import BatchRefusedError
from tasks.train.config import TrainConfig
from tasks.train.divergence import DIVERGENCES
from tasks.train.engine import Forward
from tasks.train.importance import Correction, correction
from tasks.train.loss import loss_of
from tasks.train.losses.token_loss import TokenLoss, Tokens
from tasks.train.micro_batch import MicroBatch
from tasks.train.rules import HAS_RATIO, check_objective


@dataclass(frozen=True, slots=True)
class Terms:
    """[N] values of a micro-batch's trained tokens.

    Attributes:
        total: what is minimized; the one with a gradient.
        policy: the policy's loss, before the correction.
        correction: for importance.
    """

    total: torch.Tensor
    policy: TokenLoss
    correction: Correction


class Objective:
    """What `train` asks for.

    Attributes:
        needs_sampler: True when a token without the sampler's log-probability cannot be trained on.
        needs_reference: True when one without the reference's cannot.
        entropy_gradient: True when the entropies need a gradient.
        is_recomputed: True when the old policy is the trainer's before the step, not the sampler.
        is_without_advantage: True when tokens without an advantage have a gradient too.
        skips_without_advantage: True when they are known to have none: with a loss of this package.

    Raises:
        ConfigError: settings contradict each other, or there is no such loss.
    """

    def __init__(self, config: TrainConfig) -> None:
        check_objective(config)
        self._config = config
        self._loss, has_ratio = loss_of(config)
        check_objective(config, has_ratio=has_ratio)
        self._divergence = DIVERGENCES[config.kl.estimator]
        self.is_recomputed = config.behaviour == "recomputed"
        self._is_counted = has_ratio and not self.is_recomputed
        self.needs_sampler = self._is_counted or config.importance.mode != "none"
        self.needs_reference = config.kl.coef > 0.0
        self.entropy_gradient = config.entropy_coef > 0.0
        self.is_without_advantage = self.needs_reference or self.entropy_gradient
        self.skips_without_advantage = config.loss in HAS_RATIO and not self.is_without_advantage

    def __call__(self, batch: MicroBatch, forward: Forward) -> Terms:
        """The terms of a micro-batch's trained tokens.

        Raises:
            BatchRefusedError: there is a divergence to take, and the rows have no reference log-probabilities.
        """
        tokens, config = tokens_of(batch, forward.logprobs), self._config
        divergence = self._penalty(batch, forward)
        if divergence is not None and config.kl.place == "advantage":
            tokens = replace(tokens, advantages=tokens.advantages - config.kl.coef * divergence.detach())
        policy = self._loss(tokens)
        sampled_by = tokens.old_logprobs if self.is_recomputed else tokens.logprobs
        corrected = correction(config.importance, tokens, sampled_by, is_counted=self._is_counted)
        total = policy.loss if config.importance.mode == "none" else corrected.weight * policy.loss
        if divergence is not None and config.kl.place == "loss":
            total = total + config.kl.coef * divergence
        if self.entropy_gradient:
            total = total - config.entropy_coef * forward.entropies
        return Terms(total, policy, corrected)

    def _penalty(self, batch: MicroBatch, forward: Forward) -> torch.Tensor | None:
        if not self.needs_reference:
            return None
        if batch.reference_logprobs is None:
            raise BatchRefusedError(
                "train.kl.coef is above 0, and the rows have no reference log-probabilities"
            )
        return self._divergence(forward.logprobs, batch.reference_logprobs)


def tokens_of(batch: MicroBatch, logprobs: torch.Tensor) -> Tokens:
    """What a loss is given of a micro-batch."""
    return Tokens(
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        advantages=batch.advantages,
        rows=batch.rows,
        n_rows=len(batch.row_numbers),
    )
