"""A scorer that takes a while, so that a test can kill it in the middle; worker processes import it by path."""

import time

from rollmill.tasks.score.scorer import Candidate, Reward

SECONDS = 0.1


class SlowScorer:
    """Prefers short answers."""

    name = "slow"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        time.sleep(SECONDS)
        return Reward(-float(candidate.n_completion_tokens))
