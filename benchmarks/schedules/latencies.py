"""How long everything takes: the work that every system here is given, drawn by seed."""

import math
import random
from dataclasses import dataclass

N_GROUPS, GROUP_SIZE = 32, 8
ROLLOUT_SLOTS, SCORING_SLOTS = 8, 4

ROLLOUT_SIGMA = 1.0
SCORE_MEDIAN, SCORE_SIGMA = 5.33, 0.5
SCORE_SEED_OFFSET = 1000


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds that each piece of the work takes.

    Attributes:
        rollouts_s: [P][G] of each trajectory's rollout.
        group_scores_s: [P] of scoring a whole group.
    """

    rollouts_s: tuple[tuple[float, ...], ...]
    group_scores_s: tuple[float, ...]

    def trajectory_score_s(self, group: int) -> float:
        """Seconds of scoring one trajectory of a group by itself: its share of the group's."""
        return self.group_scores_s[group] / len(self.rollouts_s[group])

    @property
    def rollout_work_s(self) -> float:
        """Seconds of all rollouts together."""
        return sum(map(sum, self.rollouts_s))

    @property
    def score_work_s(self) -> float:
        """Seconds of all scores together, by group or by trajectory alike."""
        return sum(self.group_scores_s)


def draw(seed: int, median_s: float) -> Latencies:
    """The work of one seed.

    A rollout is lognormal with median `median_s` and sigma 1.0, drawn group by group; a group's score is lognormal
    with median 5.33 `median_s` and sigma 0.5, so that scoring slots have about as much to do as rollout slots.
    """
    rollouts, scores = random.Random(seed), random.Random(seed + SCORE_SEED_OFFSET)
    return Latencies(
        tuple(
            tuple(median_s * rollouts.lognormvariate(0.0, ROLLOUT_SIGMA) for _ in range(GROUP_SIZE))
            for _ in range(N_GROUPS)
        ),
        tuple(median_s * scores.lognormvariate(math.log(SCORE_MEDIAN), SCORE_SIGMA) for _ in range(N_GROUPS)),
    )
