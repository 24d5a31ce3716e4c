"""Two scorers that want the opposite; worker processes import them by path."""

from rollmill.tasks.score.scorer import Candidate


def short(candidate: Candidate) -> float:
    """Prefer short answers."""
    return -float(candidate.n_completion_tokens)


def long(candidate: Candidate) -> float:
    """Prefer long answers."""
    return float(candidate.n_completion_tokens)
