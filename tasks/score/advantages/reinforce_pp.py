"""The group's mean as the baseline, over the deviation in the whole batch.

    A'_i = r_i - mean(r of the group)
    A_i  = (A'_i - mean(A')) / std(A')      mean and deviation over all sampled tokens of the batch

REINFORCE++ with a baseline (Hu et al. 2025, "REINFORCE++", arXiv:2501.03262; mean and deviation over tokens as in the
authors' OpenRLHF, the variance at least 1e-8). One deviation for all groups weights them by how far apart their rewards are,
where a deviation of each group's own makes them all alike. A group whose rewards are all alike is in the batch: it counts in mean
and deviation.
"""

import numpy as np

from tasks.score.advantages.mean import mean

LEAST_VARIANCE = 1e-8

of_group = mean


def of_batch(advantages: np.ndarray, n_tokens: np.ndarray) -> np.ndarray:
    """[B] advantages of every token of each trajectory, minus their mean, over their deviation.

    Args:
        advantages: [B] by group.
        n_tokens: [B] sampled tokens.

    Example: advantages .5, -.5 and 0 with 1, 1 and 2 tokens have mean 0 and variance 1/8: 1.41, -1.41 and 0.
    """
    share = n_tokens / n_tokens.sum()
    centred = advantages - (share * advantages).sum()
    variance = (share * centred**2).sum()
    return np.asarray(centred / np.sqrt(max(variance, LEAST_VARIANCE)))
