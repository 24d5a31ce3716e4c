"""Rewards for word problems with a calculator."""

import re

from tasks.score.scorer import Candidate, Reward

FORMAT_REWARD, ANSWER_REWARD = 0.1, 0.9
_NUMBER = re.compile(r"-?\d+")


class CalculatorScorer:
    """0.1 for ending with a number, and 0.9 more if it is the right one; calls are neither paid nor fined."""

    name = "calculator"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        is_number = candidate.is_complete and _NUMBER.fullmatch(candidate.answer) is not None
        is_right = is_number and candidate.answer == candidate.example["answer"]
        components = {"format": FORMAT_REWARD * is_number, "answer": ANSWER_REWARD * is_right}
        return Reward(sum(components.values()), components)
