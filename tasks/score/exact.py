"""An answer that has to be the reference, character for character."""

from tasks.errors import ScoreError
from tasks.score.scorer import Candidate, Reward


class ExactScorer:
    """1 when the policy's last message, without the white space around it, is example["answer"], else 0."""

    name = "exact"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        return Reward(float(candidate.answer.strip() == reference_answer(candidate).strip()))


def reference_answer(candidate: Candidate) -> str:
    """example["answer"] as text.

    Raises:
        ScoreError: the example has none.
    """
    if "answer" not in candidate.example:
        names = ", ".join(sorted(candidate.example)) or "none"
        raise ScoreError(f"expected `answer` among the fields of the example, there are: {names}")
    return str(candidate.example["answer"])
