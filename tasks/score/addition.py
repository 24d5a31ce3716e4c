"""Rewards for two-digit addition."""

import re

from tasks.score.scorer import Candidate, Reward

FORMAT_REWARD, ANSWER_REWARD = 0.1, 0.9
_FORMAT = re.compile(r"(?:\[[^\[\]]*\])?(\d+)")


class AdditionScorer:
    """0.1 for the format (work in brackets if any, a number, an end) and 0.9 more if the number is right."""

    name = "addition"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        match = _FORMAT.fullmatch(candidate.answer) if candidate.is_complete else None
        is_right = match is not None and match[1] == candidate.example["answer"]
        components = {"format": FORMAT_REWARD * (match is not None), "answer": ANSWER_REWARD * is_right}
        return Reward(sum(components.values()), components)
