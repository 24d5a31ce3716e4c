"""The losses by name, and those of other packages by import path."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch

from tasks.config import nearest
from tasks.errors import ConfigError
from tasks.train.config import TrainConfig
from tasks.train.losses.cispo import cispo
from tasks.train.losses.gspo import gspo
from tasks.train.losses.ppo_clip import ppo_clip
from tasks.train.losses.reinforce import reinforce
from tasks.train.losses.token_loss import Loss, TokenLoss, Tokens
from tasks.train.rules import HAS_RATIO, options_of

LOSSES: Mapping[str, Callable[[TrainConfig], Loss]] = {
    "reinforce": lambda _: reinforce,
    "ppo_clip": lambda train: partial(ppo_clip, clip_low=train.clip_low, clip_high=train.clip_high),
    "cispo": lambda train: partial(cispo, clip_low=train.clip_low, clip_high=train.clip_high),
    "gspo": lambda train: partial(gspo, clip_low=train.clip_low, clip_high=train.clip_high),
}


def loss_of(config: TrainConfig) -> tuple[Loss, bool]:
    """The loss that `train.loss` names, with its settings, and whether its gradient is weighted by pi / mu.

    One of another package is tried on three tokens.

    Raises:
        ConfigError: there is no such loss, or it does not take these settings, or does not give a TokenLoss.
    """
    if config.loss in LOSSES:
        return LOSSES[config.loss](config), HAS_RATIO[config.loss]
    function, options = _function(config.loss), options_of(config)
    try:
        signature(function).bind(None, **options)
    except TypeError as error:
        remedy = f"{config.loss}{signature(function)} is called with Tokens and these by name ({error})"
        raise ConfigError("train.loss_options", config.loss_options, remedy) from error
    loss: Loss = partial(function, **options)
    _try(config.loss, loss)
    return loss, bool(getattr(function, "has_ratio", True))


def _function(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is foreign code: whatever it raises
        raise _unknown(path, f"{type(error).__name__}: {error}") from error
    if not callable(function):
        raise _unknown(path, f"it is a {type(function).__name__}")
    return function  # type: ignore[no-any-return]  # what an import gives has no type


def _unknown(path: str, why: str) -> ConfigError:
    names = ", ".join(LOSSES)
    remedy = f"give a loss of Rollmill's ({names}) or an import path package.module:function ({why}){nearest(path, LOSSES)}"
    return ConfigError("train.loss", path, remedy)


def _try(path: str, loss: Loss) -> None:
    """Call it on two rows with three tokens."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = logprobs.detach() - 0.1
    tokens = Tokens(logprobs, old, old, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1]), 2)
    try:
        given: object = loss(tokens)
    except Exception as error:  # foreign code: whatever it raises
        raise ConfigError("train.loss", path, f"tried on three tokens, it raised {error!r}") from error
    if not isinstance(given, TokenLoss) or any(
        not torch.is_tensor(each) or each.shape != logprobs.shape for each in given
    ):
        raise ConfigError(
            "train.loss", path, "it must give a TokenLoss of four tensors [N], one value a token"
        )
    if not given.loss.requires_grad:
        raise ConfigError("train.loss", path, "its loss has no gradient: it must depend on tokens.logprobs")
