"""The advantages by name, and those of other packages by import path."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tasks.config import nearest
from tasks.errors import ConfigError, ScoreError
from tasks.score.advantages import reinforce_pp
from tasks.score.advantages.advantage import Advantage, OfBatch, OfGroup
from tasks.score.advantages.mean import mean
from tasks.score.advantages.mean_std import mean_std
from tasks.score.advantages.none import none
from tasks.score.advantages.rloo import rloo
from tasks.score.function import loaded

ADVANTAGES: Mapping[str, Advantage] = {
    "none": Advantage(none, needs_spread=False),
    "mean": Advantage(mean),
    "mean_std": Advantage(mean_std),
    "rloo": Advantage(rloo),
    "reinforce_pp": Advantage(reinforce_pp.of_group, reinforce_pp.of_batch, needs_spread=False),
}


def advantage_of(name: str) -> Advantage:
    """The advantage of a registered name, or an import path `package.module:attribute` of a function or an Advantage.

    A function is the part of a group. What is returned here for an import path raises ScoreError when it does not give
    one number for each that it was called with. The numbers may be infinite or NaN.

    Raises:
        ConfigError: there is no such function.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    try:
        found = loaded(name)
    except Exception as error:  # the module is foreign code: whatever it raises
        raise _unknown(name, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Advantage):
        if not callable(found):
            raise _unknown(name, f"it is a {type(found).__name__}")
        found = Advantage(found)
    return Advantage(
        _group_checked(name, found.of_group),
        found.of_batch and _batch_checked(name, found.of_batch),
        needs_spread=found.needs_spread,
    )


def _group_checked(name: str, function: OfGroup) -> OfGroup:
    return lambda rewards: _checked(name, function, rewards)


def _batch_checked(name: str, function: OfBatch) -> OfBatch:
    return lambda advantages, n_tokens: _checked(name, function, advantages, n_tokens)


def _checked(name: str, function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    try:
        advantages = np.asarray(function(*(each.copy() for each in arrays)), np.float64)
    except Exception as error:
        raise ScoreError(f"score.advantage {name} raised {type(error).__name__}: {error}") from error
    if advantages.shape != arrays[0].shape:
        raise ScoreError(
            f"score.advantage {name}: expected {len(arrays[0])} advantages, got the shape {advantages.shape}"
        )
    return advantages


def _unknown(name: str, why: str) -> ConfigError:
    names = ", ".join(ADVANTAGES)
    remedy = f"give a registered name ({names}) or an import path package.module:function ({why}){nearest(name, ADVANTAGES)}"
    return ConfigError("score.advantage", name, remedy)
