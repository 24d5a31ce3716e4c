"""Lengths of trajectories at two visits of the same problems, and the time that groups of them need in an order."""

import math
import random
from collections.abc import Sequence

from benchmarks.schedules.first_come import serve
from benchmarks.schedules.latencies import GROUP_SIZE, N_GROUPS

PROBLEM_SHARE = 0.5
"""Share of the variance of log lengths that is the problem's."""

Seconds = Sequence[Sequence[float]]
"""[P][G] of each trajectory: P problems, groups of G."""


def draw(seed: int) -> list[Seconds]:
    """Draw the lengths of two visits of each problem, in units of the median."""
    drawn = random.Random(seed)
    problems = [drawn.gauss(0, math.sqrt(PROBLEM_SHARE)) for _ in range(N_GROUPS)]
    sigma = math.sqrt(1 - PROBLEM_SHARE)
    return [
        [[math.exp(drawn.gauss(log_median, sigma)) for _ in range(GROUP_SIZE)] for log_median in problems]
        for _ in range(2)
    ]


def bound(lengths: Seconds, n_slots: int) -> float:
    """Return the time that no schedule is shorter than."""
    every = [each for group in lengths for each in group]
    return max(sum(every) / n_slots, *every)


def schedule(lengths: Seconds, order: Sequence[int], n_slots: int) -> float:
    """Return the time that the problems need in an order, without any overhead."""
    durations = [each for problem in order for each in lengths[problem]]
    return max(each.end_s for each in serve([0.0] * len(durations), durations, n_slots))


def scheduled_ratio(seed: int, n_slots: int, longest_first: bool) -> float:
    """Return the time of the second visit over its bound, without any overhead."""
    history, lengths = draw(seed)
    numbers = range(N_GROUPS)
    order = sorted(numbers, key=lambda each: -sum(history[each])) if longest_first else numbers
    return schedule(lengths, order, n_slots) / bound(lengths, n_slots)
