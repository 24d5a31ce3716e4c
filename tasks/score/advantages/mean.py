"""The group's mean as the baseline.

    A_i = r_i - mean(r)

Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783, equation 3), without the division by
the deviation that over-weights groups which are nearly solved or nearly unsolved.
"""

import numpy as np


def mean(rewards: np.ndarray) -> np.ndarray:
    """Return [G] rewards minus their mean. Example: [1, 0, 0, 1] gives [.5, -.5, -.5, .5]."""
    return np.asarray(rewards - rewards.mean())
