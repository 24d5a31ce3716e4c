"""Rewards that benchmarks compare with those of addition and calculator, whose examples have an answer."""

from rollmill.tasks.score.scorer import Candidate

LONGEST = 24
"""Most tokens of an answer."""
COST = 0.02


def brief(candidate: Candidate) -> float:
    """1 for an answer that contains the right number, and 0.02 less for each token."""
    is_right = str(candidate.example["answer"]) in candidate.answer
    return float(is_right) - COST * candidate.n_completion_tokens


def wordy(candidate: Candidate) -> float:
    """The share of its tokens that an answer uses."""
    return min(1.0, candidate.n_completion_tokens / LONGEST)


def short(candidate: Candidate) -> float:
    """0 for an answer without a token, down to -1 for the longest one: the opposite of `wordy`."""
    return -wordy(candidate)
