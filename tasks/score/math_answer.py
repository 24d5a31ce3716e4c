"""Mathematical answers, compared as mathematics by Hugging Face's math-verify."""

import logging

from tasks.errors import ScoreError
from tasks.score.exact import reference_answer
from tasks.score.scorer import Candidate, Reward


class MathScorer:
    r"""1 when the answer equals example["answer"] as a mathematical object, else 0.

    What is compared is the last \boxed{...} of the policy's last message, else its last formula or number. The
    library's own time limits are off, since the worker that runs this is under one.

    Example: with the reference 1/2, "it is $\frac{2}{4}$" and "0.5" get 1.
    """

    name = "math"
    version = "1"

    def warm(self) -> None:
        """Import the library, which takes seconds, before the first call."""
        logging.getLogger("math_verify").setLevel(
            logging.ERROR
        )  # it warns at each call that its limits are off
        self.score(Candidate("", {"answer": "1"}, [{"role": "assistant", "content": r"\boxed{1}"}], True))

    def score(self, candidate: Candidate) -> Reward:
        import math_verify  # not with this module: the flow imports that too, and never needs this

        answer = reference_answer(candidate)
        is_marked = "$" in answer or "\\boxed" in answer
        gold = math_verify.parse(answer if is_marked else f"${answer}$", parsing_timeout=None)
        if not gold:
            raise ScoreError(f"the reference answer {answer!r} is no mathematical expression")
        given = math_verify.parse(candidate.answer, parsing_timeout=None)
        return Reward(float(math_verify.verify(gold, given, timeout_seconds=None)))
