"""The group's mean as the baseline, divided by the deviation in the whole batch.

    A'_i = r_i - mean(r of the group)
    A_i  = (A'_i - mean(A')) / std(A')      mean and deviation over all sampled tokens of the batch

REINFORCE++ with a baseline (Hu et al. 2025, "REINFORCE++", arXiv:2501.03262; mean and deviation over tokens as in the
authors' OpenRLHF, the variance at least 1e-8). One deviation for all groups weights them by the spread of their rewards, while a
deviation for each group gives them equal weight. A group whose rewards are all equal is in the batch: it counts in mean and
deviation.
"""

import numpy as np

from rollmill.tasks.score.advantages.mean import mean

LEAST_VARIANCE = 1e-8

of_group = mean


def of_batch(advantages: np.ndarray, n_tokens: np.ndarray) -> np.ndarray:
    """Return [B] advantages minus their mean, divided by their standard deviation, both over the batch's sampled tokens.

    A trajectory counts as often as it has sampled tokens.

    Args:
        advantages: [B] rewards of trajectories minus the means of their groups.
        n_tokens: [B] numbers of sampled tokens.

    Example: advantages .5, -.5 and 0 with 1, 1 and 2 tokens have mean 0 and variance 1/8: 1.41, -1.41 and 0.
    """
    share = n_tokens / n_tokens.sum()
    centred = advantages - (share * advantages).sum()
    variance = (share * centred**2).sum()
    return np.asarray(centred / np.sqrt(max(variance, LEAST_VARIANCE)))
