"""Advantages of a group's survivors, as pure functions of their rewards.

`mean`: A_i = r_i - mean(r), the group baseline of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like
Training", eq. 3), without the division by the deviation that over-weights groups which are nearly solved.
`mean_std`: A_i = (r_i - mean(r)) / (std(r) + 1e-6), GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2),
with the population deviation.
"""

from collections.abc import Callable, Mapping

import numpy as np

STD_EPSILON = 1e-6


def mean(rewards: np.ndarray) -> np.ndarray:
    """[G] reward minus the group's mean. Example: [1, 0, 0, 1] gives [.5, -.5, -.5, .5]."""
    return np.asarray(rewards - rewards.mean())


def mean_std(rewards: np.ndarray) -> np.ndarray:
    """[G] reward minus the group's mean, over its deviation. Example: [1, 0, 0, 1] gives [1, -1, -1, 1]."""
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + STD_EPSILON))


ADVANTAGES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {"mean": mean, "mean_std": mean_std}
