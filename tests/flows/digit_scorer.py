"""A scorer whose rewards are spread whatever a model answers; worker processes of a test import it by path."""

from rollmill.tasks.score.scorer import Candidate, Reward


class DigitScorer:
    """Rewards digits."""

    name = "digits"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        return Reward(sum(character.isdigit() for character in candidate.answer) / 8)


def count_digit(candidate: Candidate, *, digit: int) -> float:
    """Rewards one digit."""
    return float(candidate.answer.count(str(digit)))
