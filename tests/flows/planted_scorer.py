"""Scorers that worker processes import by path: one misbehaves as a trajectory's number says, one looks for a variable."""

import os
import time

from rollmill.tasks.score.scorer import Candidate, Reward

RAISES, HANGS, GROUP_SIZE = 50, 100, 4


class PlantedScorer:
    """Rewards digits; raises for every 50th trajectory, and answers never for every 100th."""

    name = "planted"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        _, group, sample, _ = candidate.trajectory_id.split(".")
        number = 1 + int(group) * GROUP_SIZE + int(sample)
        if number % HANGS == 0:
            time.sleep(3600)
        if number % RAISES == 0:
            raise RuntimeError(f"planted for number {number}")
        return Reward(sum(character.isdigit() for character in candidate.answer) / 8)


def sees_variable(candidate: Candidate) -> float:
    """Reward 1 if the worker has the variable that `rollout.env_variables` names, 0 otherwise."""
    return float("PLANTED_VARIABLE" in os.environ)


def sees_variable_too(candidate: Candidate) -> float:
    """Return the same; it is another scorer for rescoring."""
    return sees_variable(candidate)
