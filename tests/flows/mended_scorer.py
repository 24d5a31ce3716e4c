"""A scorer before and after it was mended; worker processes import it by path."""

from rollmill.tasks.score.scorer import Candidate, Reward


class FailingScorer:
    """Fails on every trajectory."""

    name = "mended"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        raise ValueError(f"no reward for {candidate.answer!r}")


class MendedScorer:
    """Prefers short answers."""

    name = "mended"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        return Reward(-float(candidate.n_completion_tokens))
