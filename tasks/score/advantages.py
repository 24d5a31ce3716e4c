"""Advantage functions by name, each with its formula and paper, and those of user code by import path.

In the formulas r_i is the reward of the i-th of a group's G trajectories, A_i its advantage.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from rollmill.tasks.config import find_plugins, suggest
from rollmill.tasks.errors import ConfigError, ScoreError, user_error_text
from rollmill.tasks.score.score_function import load_object
from rollmill.tasks.user_code.arguments import bind_arguments
from rollmill.tasks.user_code.plug_in import PlugIn

OfGroup: TypeAlias = Callable[[np.ndarray], Any]
OfBatch: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]
ByPosition: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]


@dataclass(frozen=True, slots=True)
class Advantage:
    """The functions that compute advantages from rewards: one over a group, and optionally one over the batch.

    Attributes:
        of_group: takes [G] float64 rewards of a group's survivors, returns [G] numbers. With `score.credit` turn or token it takes the
            returns to go of the G trajectories that have a turn or token, once for each.
        of_batch: takes [B] float64 group advantages of all trained trajectories and [B] int64 numbers of sampled tokens,
            returns [B] numbers; with `score.credit` turn or token B are all sampled tokens, each 1 token. None: there is no
            batch part.
        needs_spread: True if a group whose rewards are all equal has nothing to train on, and is left out; likewise a turn or token
            at which all returns to go are equal has the advantage 0.
        by_position: with `score.credit` turn or token, takes [G, K] float64 rewards and [G, K] bool and returns [G, K] numbers, of K
            turns or sampled tokens; False and 0 where a trajectory has ended. None: `of_group` over returns to go.
        takes_columns: True if `of_group` also takes [G, K] and returns [G, K], each column by itself; it is then called less often.
    """

    of_group: OfGroup
    of_batch: OfBatch | None = None
    needs_spread: bool = True
    by_position: ByPosition | None = None
    takes_columns: bool = False


FIELD = "score.advantage"
STD_EPSILON = 1e-6
ROUNDING = 1e-9
"""Largest difference of rewards, relative to the largest of them, that counts as rounding."""
LEAST_VARIANCE = 1e-8


def differ(rewards: np.ndarray) -> np.ndarray:
    """Return [] or [K] bool: whether [G] or [G, K] rewards differ, column by column, by more than rounding."""
    return np.asarray(np.ptp(rewards, axis=0) > ROUNDING * np.abs(rewards).max(axis=0))


def none(rewards: np.ndarray) -> np.ndarray:
    """Return the [G] rewards unchanged, without a baseline: A_i = r_i. Example: [1, 0, 0, 1] gives [1, 0, 0, 1].

    REINFORCE (Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
    theorem 1, with the baseline 0). A group whose rewards are all equal is trained on: its rewards say how good the answers are,
    not which are better.
    """
    return rewards


def zero(rewards: np.ndarray) -> np.ndarray:
    """Return [G] zeros: A_i = 0, so that the KL term alone trains, as in distillation. Example: [1, 0, 0, 1] gives [0, 0, 0, 0]."""
    return np.zeros_like(rewards)


def mean(rewards: np.ndarray) -> np.ndarray:
    """Return [G] rewards minus the group's mean. Example: [1, 0, 0, 1] gives [.5, -.5, -.5, .5].

        A_i = r_i - mean(r)

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783, equation 3), without the division by
    the deviation that over-weights groups which are nearly solved or nearly unsolved.
    """
    return np.asarray(rewards - rewards.mean(axis=0))


def mean_std(rewards: np.ndarray) -> np.ndarray:
    """Return [G] rewards minus their mean, divided by their standard deviation: A_i = (r_i - mean(r)) / (std(r) + 1e-6).

    GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2), with the population deviation; that of a sample,
    which some take, makes it smaller by sqrt(1 - 1/G).

    Example: [1, 0, 0, 1] gives about [1, -1, -1, 1].
    """
    return np.asarray((rewards - rewards.mean(axis=0)) / (rewards.std(axis=0) + STD_EPSILON))


def rloo(rewards: np.ndarray) -> np.ndarray:
    """Return [G] rewards, each minus the mean of the group's other rewards; G is at least 2.

        A_i = r_i - (1 / (G - 1)) sum over j != i of r_j = G / (G - 1) (r_i - mean(r))

    RLOO (Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, "Back to Basics",
    arXiv:2402.14740, equation 9). The baseline does not depend on the answer itself, so the gradient has no bias.

    Example: [1, 0, 0, 1] gives [2/3, -2/3, -2/3, 2/3].
    """
    return np.asarray((rewards - rewards.mean(axis=0)) * len(rewards) / (len(rewards) - 1))


def normalize_over_batch(advantages: np.ndarray, n_tokens: np.ndarray) -> np.ndarray:
    """Return [B] advantages minus their mean, divided by their standard deviation, both over the batch's sampled tokens.

        A_i = (A'_i - mean(A')) / std(A')      with A'_i = r_i - mean(r of the group)

    REINFORCE++ with a baseline (Hu et al. 2025, "REINFORCE++", arXiv:2501.03262; mean and deviation over tokens as in the
    authors' OpenRLHF, the variance at least 1e-8). One deviation for all groups weights them by the spread of their rewards, while
    a deviation for each group gives them equal weight. A group whose rewards are all equal is in the batch: it counts in mean and
    deviation.

    Args:
        advantages: [B] rewards of trajectories minus the means of their groups.
        n_tokens: [B] numbers of sampled tokens; a trajectory counts as often as it has some.

    Example: advantages .5, -.5 and 0 with 1, 1 and 2 tokens have mean 0 and variance 1/8: 1.41, -1.41 and 0.
    """
    if not n_tokens.any():
        return advantages
    share = n_tokens / n_tokens.sum()
    centred = advantages - (share * advantages).sum()
    variance = (share * centred**2).sum()
    return np.asarray(centred / np.sqrt(max(variance, LEAST_VARIANCE)))


ADVANTAGES: Mapping[str, Advantage] = {
    "none": Advantage(none, needs_spread=False, takes_columns=True),
    "zero": Advantage(zero, needs_spread=False, takes_columns=True),
    "mean": Advantage(mean, takes_columns=True),
    "mean_std": Advantage(mean_std, takes_columns=True),
    "rloo": Advantage(rloo, takes_columns=True),
    "reinforce_pp": Advantage(mean, normalize_over_batch, needs_spread=False, takes_columns=True),
}


def resolve_advantage(plug_in: PlugIn) -> Advantage:
    """Return the Advantage with a registered name, or at an import path `package.module:attribute`.

    A function at the path becomes `Advantage.of_group`, and is called with the arguments of the plug-in too. An advantage from an
    import path raises ScoreError when it does not return one number for each input; the numbers may be infinite or NaN.

    Raises:
        ConfigError: there is no such function, or an argument is unknown, missing or of another type.
    """
    name, args = plug_in.name, plug_in.args
    if name in ADVANTAGES and not args:
        return ADVANTAGES[name]
    try:
        found = ADVANTAGES.get(name) or load_object(find_plugins("advantages").get(name, name))
    except (Exception, SystemExit) as error:
        # The module is foreign code: whatever it raises.
        raise _unknown_advantage(name, f"{type(error).__name__}: {user_error_text(error)}") from error
    if not isinstance(found, Advantage):
        if not callable(found):
            raise _unknown_advantage(name, f"it is a {type(found).__name__}")
        found = Advantage(partial(found, **bind_arguments(FIELD, found, args, 1)))
    elif args:
        raise ConfigError(
            f"{FIELD}.args", args, "it takes no arguments, which only a function takes: give none"
        )
    return Advantage(
        partial(_call_checked, name, found.of_group),
        found.of_batch and partial(_call_checked, name, found.of_batch),
        found.needs_spread,
        found.by_position and partial(_call_checked, name, found.by_position),
        found.takes_columns,
    )


def _call_checked(name: str, function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    try:
        # Copies: user code may change its arguments, which the caller still needs.
        advantages = np.asarray(function(*(each.copy() for each in arrays)), np.float64)
    except (Exception, SystemExit) as error:
        raise ScoreError(f"{FIELD} {name} raised {type(error).__name__}: {user_error_text(error)}") from error
    if advantages.shape != arrays[0].shape:
        expected = " x ".join(map(str, arrays[0].shape))
        raise ScoreError(f"{FIELD} {name}: expected {expected} advantages, got the shape {advantages.shape}")
    return advantages


def _unknown_advantage(name: str, why: str) -> ConfigError:
    names = (*ADVANTAGES, *find_plugins("advantages"))
    remedy = (
        f"{why}; give a registered name ({', '.join(names)}) or an import path package.module:function"
        f"{suggest(name, names)}"
    )
    return ConfigError(FIELD, name, remedy)
