"""Rewards for guessing a number."""

from tasks.score.scorer import Candidate, Reward


class GuessScorer:
    """1 when the last guess is the number, 0 otherwise; how many guesses it took does not matter."""

    name = "guess"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        is_won = candidate.is_complete and candidate.answer == f"{candidate.example['answer']}?"
        return Reward(float(is_won), {"won": float(is_won)})
