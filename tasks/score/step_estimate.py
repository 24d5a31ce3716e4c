"""What a step of policy improvement is worth, estimated from stored rewards alone, with the effective sample size."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """A group's trajectories: their advantages under the scorer that is trained on, and their rewards under others.

    Attributes:
        advantages: [n] float64; 0 for trajectories that are not trained on.
        rewards: [n, scorers] float64; NaN without a score.
    """

    advantages: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Estimated gains of one step of improvement.

    Attributes:
        gains: [scorers] mean reward after the step minus that of the stored trajectories.
        errors: [scorers] standard errors of the gains over groups.
        n_trained: groups that are trained on.
        n_effective: effective sample size: the number of trajectories that the weighted ones are worth.
        n: trajectories.
    """

    gains: np.ndarray
    errors: np.ndarray
    n_trained: int
    n_effective: float
    n: int


def estimate_step(groups: Sequence[GroupRewards]) -> StepEstimate:
    """Estimate what a step in the direction of the advantages gains, under each scorer.

    The step leads from the policy mu that sampled a group to pi(y|x) proportional to mu(y|x) exp(A(x, y) / s), the policy of largest
    mean advantage at its distance in KL divergence from mu (REPS, Peters et al., AAAI 2010). Its weights pi/mu are known without a
    model: w = exp(A / s) divided by their sum in the group (self-normalised importance sampling). s is the root mean square of
    the advantages that are trained on, so that the scale of a scorer does not matter, as it does not to Adam. A group's gain is sum(w r) - mean(r),
    0 if the group is not trained on. The effective sample size is the sum of 1 / sum(w^2) over groups (Kish 1965).

    Example: advantages (.5, -.5) have s = .5 and weights e / (e + 1/e) = .88 and .12: rewards (1, 0) gain .38.
    """
    trained = [each.advantages for each in groups if each.advantages.any()]
    scale = float(np.sqrt(np.mean(np.concatenate(trained) ** 2))) if trained else 1.0
    n_scorers = groups[0].rewards.shape[1] if groups else 0
    gains, n_effective = np.zeros((len(groups), n_scorers)), 0.0
    for at, group in enumerate(groups):
        weights = np.exp((group.advantages - group.advantages.max()) / scale)
        n_effective += float(weights.sum() ** 2 / (weights**2).sum())
        for scorer, rewards in enumerate(group.rewards.T):
            has = ~np.isnan(rewards)
            if has.any():
                gains[at, scorer] = np.average(rewards[has], weights=weights[has]) - rewards[has].mean()
    n = len(groups)
    errors = gains.std(axis=0, ddof=1) / np.sqrt(n) if n > 1 else np.full(n_scorers, np.nan)
    return StepEstimate(
        gains=gains.mean(axis=0) if n else np.zeros(n_scorers),
        errors=errors,
        n_trained=len(trained),
        n_effective=n_effective,
        n=sum(len(each.advantages) for each in groups),
    )
