"""Advantages of a group's survivors, as pure functions of their rewards.

`mean`: A_i = r_i - mean(r), the group baseline of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like
Training", eq. 3), without the division by the deviation that over-weights groups which are nearly solved.
`mean_std`: A_i = (r_i - mean(r)) / (std(r) + 1e-6), GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2),
with the population deviation.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from tasks.errors import ConfigError, ScoreError
from tasks.score.function import loaded

STD_EPSILON = 1e-6

Advantage: TypeAlias = Callable[[np.ndarray], np.ndarray]


def mean(rewards: np.ndarray) -> np.ndarray:
    """[G] reward minus the group's mean. Example: [1, 0, 0, 1] gives [.5, -.5, -.5, .5]."""
    return np.asarray(rewards - rewards.mean())


def mean_std(rewards: np.ndarray) -> np.ndarray:
    """[G] reward minus the group's mean, over its deviation. Example: [1, 0, 0, 1] gives [1, -1, -1, 1]."""
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + STD_EPSILON))


ADVANTAGES: Mapping[str, Advantage] = {"mean": mean, "mean_std": mean_std}


def advantage_of(name: str) -> Advantage:
    """The function of a registered name or an import path `package.module:function`.

    It is called with [G] float64 rewards and gives [G] numbers, a list or an array; what is returned here
    raises ScoreError when it does otherwise. The numbers may be infinite or NaN.

    Raises:
        ConfigError: there is no such function.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    try:
        function = loaded(name)
    except Exception as error:  # the module is foreign code: whatever it raises
        raise _unknown(name, f"{type(error).__name__}: {error}") from error
    if not callable(function):
        raise _unknown(name, f"it is a {type(function).__name__}")
    return lambda rewards: _checked(name, function, rewards)


def _checked(name: str, function: Callable[[np.ndarray], Any], rewards: np.ndarray) -> np.ndarray:
    try:
        advantages = np.asarray(function(rewards.copy()), np.float64)
    except Exception as error:
        raise ScoreError(f"score.advantage {name} raised {type(error).__name__}: {error}") from error
    if advantages.shape != rewards.shape:
        raise ScoreError(
            f"score.advantage {name}: expected {len(rewards)} advantages, got the shape {advantages.shape}"
        )
    return advantages


def _unknown(name: str, why: str) -> ConfigError:
    names = ", ".join(ADVANTAGES)
    remedy = f"give a registered name ({names}) or an import path package.module:function ({why})"
    return ConfigError("score.advantage", name, remedy)
