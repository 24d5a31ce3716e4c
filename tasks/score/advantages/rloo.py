"""The mean of the others as the baseline.

    A_i = r_i - (1 / (G - 1)) sum over j != i of r_j = G / (G - 1) (r_i - mean(r))

RLOO (Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, "Back to Basics",
arXiv:2402.14740, equation 9). The baseline does not depend on the answer itself, so the gradient has no bias.
"""

import numpy as np


def rloo(rewards: np.ndarray) -> np.ndarray:
    """Return [G] rewards, each minus the mean of the group's other rewards; G is at least 2.

    Example: [1, 0, 0, 1] gives [2/3, -2/3, -2/3, 2/3].
    """
    return np.asarray((rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1))
