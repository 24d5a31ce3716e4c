"""What is minimized for a token, before the average over tokens; and the losses by name.

    weight loss(A) + kl.coef k - entropy_coef H

with `loss` the policy's (see losses), `weight` the importance weight (see importance), k an estimator of the
divergence from the reference policy (see kl) and H the entropy of the policy's distribution of the token. With
`kl.apply_to: advantage` the divergence is subtracted from the advantage instead, without a gradient: A - kl.coef k for A. The
average over tokens is that of normalization.

`python -m rollmill.tasks.train.objective.objective TRAIN_CONFIG_JSON` reports what is wrong with the objective of a
configuration; only a process with torch can look at a loss of another package. It prints JSON: the ConfigError's field,
value and remedy, or null.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rollmill.tasks.config import find_plugins, suggest
from rollmill.tasks.errors import BatchRefusedError, ConfigError, user_error_text
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Forward
from rollmill.tasks.train.objective.importance import ImportanceWeights, importance_weights
from rollmill.tasks.train.objective.kl import KL_ESTIMATORS
from rollmill.tasks.train.objective.losses.cispo import cispo
from rollmill.tasks.train.objective.losses.gspo import gspo
from rollmill.tasks.train.objective.losses.ppo_clip import ppo_clip
from rollmill.tasks.train.objective.losses.reinforce import reinforce
from rollmill.tasks.train.objective.losses.token_loss import Loss, TokenLoss, Tokens
from rollmill.tasks.train.packing.micro_batch import MicroBatch
from rollmill.tasks.train.setting_rules import HAS_RATIO, check_objective
from rollmill.tasks.user_code.arguments import bind_arguments

LOSSES: Mapping[str, Callable[[TrainConfig], Loss]] = {
    "reinforce": lambda _: reinforce,
    "ppo_clip": lambda train: partial(
        ppo_clip, clip_low=train.clip_low, clip_high=train.clip_high, clip_dual=train.clip_dual
    ),
    "cispo": lambda train: partial(cispo, clip_low=train.clip_low, clip_high=train.clip_high),
    "gspo": lambda train: partial(gspo, clip_low=train.clip_low, clip_high=train.clip_high),
}


def build_loss(config: TrainConfig) -> tuple[Loss, bool]:
    """Return the loss that `train.loss` names, with its arguments, and whether the probability ratio weights its gradient.

    The ratio is that of the policy to the old policy. A loss of another package is tried on three tokens.

    Raises:
        ConfigError: there is no such loss, or it does not take these arguments, or does not return a TokenLoss.
    """
    name = config.loss.name
    if name in LOSSES:
        return LOSSES[name](config), HAS_RATIO[name]
    function = _import_loss(name)
    loss: Loss = partial(function, **bind_arguments("train.loss", function, config.loss.args, 1))
    _try_loss(name, loss)
    return loss, bool(getattr(function, "has_ratio", True))


def _import_loss(path: str) -> Callable[..., Any]:
    """Return the function at an import path package.module:function; ConfigError if there is none."""
    module, _, attribute = find_plugins("losses").get(path, path).partition(":")
    cause: BaseException | None = None
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        why = "" if callable(function) else f"it is a {type(function).__name__}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the module is foreign code: whatever it raises
        why, cause = f"{type(error).__name__}: {user_error_text(error)}", error
    if why:
        names = ", ".join(LOSSES)
        remedy = f"give a loss of Rollmill's ({names}) or an import path package.module:function ({why}){suggest(path, LOSSES)}"
        raise ConfigError("train.loss", path, remedy) from cause
    return function


def _try_loss(path: str, loss: Loss) -> None:
    """Refuse a loss that fails on three tokens, or does not return a TokenLoss with a gradient."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = logprobs.detach() - 0.1
    tokens = Tokens(logprobs, old, old, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1]), 2)
    try:
        given: object = loss(tokens)
    except (Exception, SystemExit) as error:
        # Foreign code: whatever it raises.
        raise ConfigError(
            "train.loss",
            path,
            f"tried on three tokens, it raised {type(error).__name__}: {user_error_text(error)}",
        ) from error
    if not isinstance(given, TokenLoss) or any(
        not torch.is_tensor(each) or each.shape != logprobs.shape for each in given
    ):
        raise ConfigError(
            "train.loss", path, "it must give a TokenLoss of four tensors [N], one value a token"
        )
    if not given.loss.requires_grad:
        raise ConfigError("train.loss", path, "its loss has no gradient: it must depend on tokens.logprobs")


@dataclass(frozen=True, slots=True)
class ObjectiveTerms:
    """Objective of a micro-batch's N trained tokens, and two terms that it is made of, as [N] values.

    Attributes:
        total: what is minimized, before the average over tokens; has the gradient.
        policy: the policy loss, before importance weights, KL term and entropy bonus.
        correction: importance weights, which multiply the policy loss.
    """

    total: torch.Tensor
    policy: TokenLoss
    correction: ImportanceWeights


class Objective:
    """The training objective that the settings of `train` describe.

    Attributes:
        needs_sampler: True if tokens without the sampler's log-probability cannot be trained on.
        needs_reference: True if tokens without the reference policy's log-probability cannot be trained on.
        entropy_gradient: True if the entropies need a gradient.
        uses_trainer_logprobs: True if the old log-probabilities are the trainer's before the step; False: the sampler's.
        is_without_advantage: True if tokens with advantage 0 have a gradient too, by the KL term or the entropy bonus.
        skips_without_advantage: True if rows with advantage 0 can be left out, since their gradient is known to be 0: with a
            built-in loss, without KL term and entropy bonus.

    Raises:
        ConfigError: settings contradict each other, or there is no such loss.
    """

    def __init__(self, config: TrainConfig) -> None:
        # Before the loss is imported, so that the simpler mistakes are reported first; again once its ratio is known.
        check_objective(config)
        self._config = config
        self._loss, has_ratio = build_loss(config)
        check_objective(config, has_ratio=has_ratio)
        self._divergence = KL_ESTIMATORS[config.kl.estimator]
        self.uses_trainer_logprobs = config.old_logprobs == "trainer"
        self._has_sampler_ratio = has_ratio and not self.uses_trainer_logprobs
        self.needs_sampler = self._has_sampler_ratio or config.importance.mode != "none"
        self.needs_reference = config.kl.coef > 0.0
        self.entropy_gradient = config.entropy_coef > 0.0
        self.is_without_advantage = self.needs_reference or self.entropy_gradient
        self.skips_without_advantage = config.loss.name in HAS_RATIO and not self.is_without_advantage

    def __call__(self, batch: MicroBatch, forward: Forward) -> ObjectiveTerms:
        """Compute the objective of a micro-batch's trained tokens.

        Raises:
            BatchRefusedError: `train.kl.coef` is above 0, and the rows have no reference log-probabilities.
        """
        tokens, config = build_tokens(batch, forward.logprobs), self._config
        divergence: torch.Tensor | None = None
        if self.needs_reference:
            if batch.reference_logprobs is None:
                raise BatchRefusedError(
                    "train.kl.coef is above 0, and the rows have no reference log-probabilities"
                )
            divergence = self._divergence(forward.logprobs, batch.reference_logprobs)
        if divergence is not None and config.kl.apply_to == "advantage":
            tokens = replace(tokens, advantages=tokens.advantages - config.kl.coef * divergence.detach())
        # A rank without a row has no tokens, of which a loss need not know; autograd still needs its way through the model.
        of_none = tokens.logprobs.detach()
        policy = self._loss(tokens) if len(of_none) else TokenLoss(tokens.logprobs, of_none, of_none, of_none)
        # The loss assumes that the old policy sampled the tokens: the correction is for the way from the sampler to that one.
        sampled_by = tokens.old_logprobs if self.uses_trainer_logprobs else tokens.logprobs
        corrected = importance_weights(
            config.importance, tokens, sampled_by, has_sampler_ratio=self._has_sampler_ratio
        )
        total = policy.loss if config.importance.mode == "none" else corrected.weight * policy.loss
        if divergence is not None and config.kl.apply_to == "loss":
            total = total + config.kl.coef * divergence
        if self.entropy_gradient:
            total = total - config.entropy_coef * forward.entropies
        return ObjectiveTerms(total, policy, corrected)


def build_tokens(batch: MicroBatch, logprobs: torch.Tensor) -> Tokens:
    """Build the input of a loss from a micro-batch and the policy's log-probabilities."""
    return Tokens(
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        advantages=batch.advantages,
        rows=batch.rows,
        n_rows=len(batch.row_numbers),
    )


def main() -> None:
    """Check the `TrainConfig` in the first argument (JSON); print null, or the error's field, value and remedy as JSON."""
    try:
        Objective(TrainConfig.model_validate_json(sys.argv[1]))
    except ConfigError as error:
        value = error.value if isinstance(error.value, dict) else str(error.value)
        sys.stdout.write(json.dumps([error.field, value, error.remedy]))
    else:
        sys.stdout.write("null")


if __name__ == "__main__":
    main()
