"""Advantage functions by name, and those of user code by import path."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from rollmill.tasks.config import nearest
from rollmill.tasks.errors import ConfigError, ScoreError
from rollmill.tasks.score.advantages import reinforce_pp
from rollmill.tasks.score.advantages.mean import mean
from rollmill.tasks.score.advantages.mean_std import mean_std
from rollmill.tasks.score.advantages.none import none
from rollmill.tasks.score.advantages.rloo import rloo
from rollmill.tasks.score.score_function import load_object

OfGroup: TypeAlias = Callable[[np.ndarray], Any]
OfBatch: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]


@dataclass(frozen=True, slots=True)
class Advantage:
    """The functions that compute advantages from rewards: one over a group, and optionally one over the batch.

    Attributes:
        of_group: takes [G] float64 rewards of a group's survivors, returns [G] numbers.
        of_batch: takes [B] float64 group advantages of all trained trajectories and [B] int64 numbers of sampled tokens,
            returns [B] numbers; None: there is no batch part.
        needs_spread: True if a group whose rewards are all equal has nothing to train on, and is left out.
    """

    of_group: OfGroup
    of_batch: OfBatch | None = None
    needs_spread: bool = True


ADVANTAGES: Mapping[str, Advantage] = {
    "none": Advantage(none, needs_spread=False),
    "mean": Advantage(mean),
    "mean_std": Advantage(mean_std),
    "rloo": Advantage(rloo),
    "reinforce_pp": Advantage(reinforce_pp.of_group, reinforce_pp.of_batch, needs_spread=False),
}


def resolve_advantage(name: str) -> Advantage:
    """Return the Advantage with a registered name, or at an import path `package.module:attribute`.

    A function at the path becomes `Advantage.of_group`. An advantage from an import path raises ScoreError when it does not return
    one number for each input; the numbers may be infinite or NaN.

    Raises:
        ConfigError: there is no such function.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    try:
        found = load_object(name)
    except Exception as error:
        # The module is foreign code: whatever it raises.
        raise _unknown_advantage(name, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Advantage):
        if not callable(found):
            raise _unknown_advantage(name, f"it is a {type(found).__name__}")
        found = Advantage(found)
    return Advantage(
        partial(_call_checked, name, found.of_group),
        found.of_batch and partial(_call_checked, name, found.of_batch),
        needs_spread=found.needs_spread,
    )


def _call_checked(name: str, function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    try:
        # Copies: user code may change its arguments, which the caller still needs.
        advantages = np.asarray(function(*(each.copy() for each in arrays)), np.float64)
    except Exception as error:
        raise ScoreError(f"score.advantage {name} raised {type(error).__name__}: {error}") from error
    if advantages.shape != arrays[0].shape:
        raise ScoreError(
            f"score.advantage {name}: expected {len(arrays[0])} advantages, got the shape {advantages.shape}"
        )
    return advantages


def _unknown_advantage(name: str, why: str) -> ConfigError:
    names = ", ".join(ADVANTAGES)
    remedy = f"give a registered name ({names}) or an import path package.module:function ({why}){nearest(name, ADVANTAGES)}"
    return ConfigError("score.advantage", name, remedy)
