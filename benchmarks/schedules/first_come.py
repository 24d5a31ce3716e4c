"""First come, first served without any overhead: the schedules that ours are measured against, and their bound."""

import heapq
from collections.abc import Sequence

from benchmarks.schedules.latencies import ROLLOUT_SLOTS, SCORING_SLOTS, Latencies
from benchmarks.schedules.timeline import Interval, Timeline


def serve(arrivals_s: Sequence[float], durations_s: Sequence[float], n_slots: int) -> list[Interval]:
    """When each piece of work has its slot: by time of arrival, then by number.

    Example: arrivals 0, 0, 0 that take 3, 1, 1 in two slots run from 0 to 3, 0 to 1 and 1 to 2.
    """
    free_s = [0.0] * n_slots
    served = [Interval(0.0, 0.0)] * len(arrivals_s)
    for number in sorted(range(len(arrivals_s)), key=lambda number: (arrivals_s[number], number)):
        start_s = max(arrivals_s[number], heapq.heappop(free_s))
        served[number] = Interval(start_s, start_s + durations_s[number])
        heapq.heappush(free_s, served[number].end_s)
    return served


def by_trajectory(latencies: Latencies) -> Timeline:
    """Groups in order; each trajectory is scored by itself once its own rollout is there."""
    rollouts_P_G = _rollouts(latencies)
    arrivals = [rollout.end_s for group in rollouts_P_G for rollout in group]
    durations = [
        latencies.trajectory_score_s(number) for number, group in enumerate(rollouts_P_G) for _ in group
    ]
    return _timeline(rollouts_P_G, serve(arrivals, durations, SCORING_SLOTS))


def by_group(latencies: Latencies) -> Timeline:
    """Groups in order; each is scored as a whole once its last rollout is there."""
    rollouts_P_G = _rollouts(latencies)
    arrivals = [max(rollout.end_s for rollout in group) for group in rollouts_P_G]
    return _timeline(rollouts_P_G, serve(arrivals, latencies.group_scores_s, SCORING_SLOTS))


def trajectory_bound_s(latencies: Latencies) -> float:
    """No schedule is shorter: all rollout slots busy, all scoring slots busy, or one trajectory and its score."""
    chains = [
        rollout_s + latencies.trajectory_score_s(number)
        for number, group in enumerate(latencies.rollouts_s)
        for rollout_s in group
    ]
    return max(_work_bound_s(latencies), *chains)


def group_bound_s(latencies: Latencies) -> float:
    """The same where a group is scored as a whole: its chain is its slowest rollout, then its score."""
    chains = [
        max(group) + score_s
        for group, score_s in zip(latencies.rollouts_s, latencies.group_scores_s, strict=True)
    ]
    return max(_work_bound_s(latencies), *chains)


def _work_bound_s(latencies: Latencies) -> float:
    return max(latencies.rollout_work_s / ROLLOUT_SLOTS, latencies.score_work_s / SCORING_SLOTS)


def _rollouts(latencies: Latencies) -> list[list[Interval]]:
    durations = [seconds for group in latencies.rollouts_s for seconds in group]
    served = iter(serve([0.0] * len(durations), durations, ROLLOUT_SLOTS))
    return [[next(served) for _ in group] for group in latencies.rollouts_s]


def _timeline(rollouts_P_G: Sequence[Sequence[Interval]], scores: Sequence[Interval]) -> Timeline:
    rollouts = [rollout for group in rollouts_P_G for rollout in group]
    return Timeline(max(end for _, end in [*rollouts, *scores]), rollouts, scores)
