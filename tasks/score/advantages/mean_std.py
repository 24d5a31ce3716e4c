"""The group's mean as the baseline, over the group's deviation.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)

GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2), with the population deviation; that of a sample,
which some take, makes it smaller by sqrt(1 - 1/G).
"""

import numpy as np

STD_EPSILON = 1e-6


def mean_std(rewards: np.ndarray) -> np.ndarray:
    """Return [G] rewards minus their mean, divided by their standard deviation plus 1e-6.

    Example: [1, 0, 0, 1] gives about [1, -1, -1, 1].
    """
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + STD_EPSILON))
