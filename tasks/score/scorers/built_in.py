"""Scorers of the built-in environments, exact match with a reference, and the reward that an environment computes itself."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

from rollmill.tasks.errors import ScoreError
from rollmill.tasks.score.scorer import Candidate, Reward

FORMAT_REWARD, ANSWER_REWARD = 0.1, 0.9
_FORMAT = re.compile(r"(?:\[[^\[\]]*\])?(\d+)")


class AdditionScorer:
    """Scorer: 0.1 for the format (optional work in brackets, a number, an end token), plus 0.9 if the number is right."""

    name = "addition"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        match = _FORMAT.fullmatch(candidate.answer) if candidate.is_complete else None
        is_right = match is not None and match[1] == candidate.example["answer"]
        return _grade(is_formatted=match is not None, is_right=is_right)


_NUMBER = re.compile(r"-?\d+")


class CalculatorScorer:
    """Scorer: 0.1 if the policy's last message is a number, plus 0.9 if that is right; tool calls do not count."""

    name = "calculator"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        is_number = candidate.is_complete and _NUMBER.fullmatch(candidate.answer) is not None
        is_right = is_number and candidate.answer == candidate.example["answer"]
        return _grade(is_formatted=is_number, is_right=is_right)


class CalculatorTurnsScorer:
    """Scorer: the reward of `calculator`, divided over the turns: 0.9 for a call whose result is right, the rest for the answer.

    Example: a call whose result is right and an answer that miscopies it get 0.9 and -0.8, and the trajectory 0.1.
    """

    name = "calculator_turns"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        components = CalculatorScorer().score(candidate).components
        value, of_format = sum(components.values()), components["format"]
        results = [each["content"] for each in candidate.messages if each["role"] == "tool"]
        of_call = ANSWER_REWARD * (f"{candidate.example['answer']}|" in results)
        # Without a call there is one turn, and none where the problem left no room for an answer.
        turns = (
            [value]
            if len(candidate.turn_messages) == 1
            else [of_call, components["answer"] - of_call + of_format]
        )
        return Reward(value, components, turns=turns if candidate.turn_messages else None)


def _grade(*, is_formatted: bool, is_right: bool) -> Reward:
    components = {"format": FORMAT_REWARD * is_formatted, "answer": ANSWER_REWARD * is_right}
    return Reward(sum(components.values()), components)


class ExactScorer:
    """Scorer: 1 if the policy's last message, stripped of white space, equals example["answer"], else 0."""

    name = "exact"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        return Reward(float(candidate.answer.strip() == reference_answer(candidate).strip()))


def reference_answer(candidate: Candidate) -> str:
    """Return example["answer"] as text.

    Raises:
        ScoreError: the example has none.
    """
    if "answer" not in candidate.example:
        names = ", ".join(sorted(candidate.example)) or "none"
        raise ScoreError(f"expected `answer` among the fields of the example, there are: {names}")
    return str(candidate.example["answer"])


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE_CONTENT = re.compile(r"(?![A-Za-z]{2})(?:(?!\\[)\]])[^\s$])+")
# A brace after a backslash is text; it opens and closes nothing.
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
# What an empty box may hold: space, braces or a \text around it, and signs of what is left out.
_EMPTY = re.compile(r"\\(?:[,!;: ]|text(?:bf|it|rm)?|q?quad|[lc]?dots)(?![A-Za-z])|[\s~{}$.?]")
# In a formula a plain space has no meaning; a number with groups of three digits, which is no exponent, index or part of a command.
_GROUPED_NUMBER = re.compile(r"(?<![\w^}.\\])\d{1,3}(?: +\d{3})+(?!\d)")
# LaTeX's spaces between groups of three digits.
_SPACED_DIGITS = re.compile(r"(?<=\d)(?:\\[,!;: ]|~)+(?=\d{3}(?!\d))")
# The one at the end, also within braces; "..." and the delimiter of \right. are none.
_FULL_STOP = re.compile(r"(?<!\.)(?<!\\right)\.(?=[\s}$]*$)")


class MathScorer:
    r"""1 if the answer equals example["answer"] as a mathematical object, else 0.

    The answer is the last \boxed{...} with content in the policy's last message; without one the last \fbox{...}, formula or
    number. A last box that is not closed is no answer. The library's time limits are off, because the worker has one.

    Example: with the reference 1/2, "it is $\frac{2}{4}$", "0.5" and "\boxed{2}, no: \boxed{1/2}" get 1.
    """

    name = "math"
    version = "4"

    def warm(self) -> None:
        """Import the library math_verify, which takes seconds, before the first call."""
        # The library warns at each call that its limits are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.score(Candidate("", {"answer": "1"}, [{"role": "assistant", "content": r"\boxed{1}"}], True))

    def score(self, candidate: Candidate) -> Reward:
        # Not with this module: the flow imports that too, and never needs the library.
        import math_verify

        answer = reference_answer(candidate)
        is_marked = "$" in answer or "\\boxed" in answer
        text = _find_answer(answer) if is_marked else f"${_clean_formula(answer)}$"
        gold = math_verify.parse(text, parsing_timeout=None)
        if not gold:
            raise ScoreError(f"the reference answer {answer!r} is no mathematical expression")
        given = math_verify.parse(_find_answer(candidate.answer), parsing_timeout=None)
        return Reward(float(math_verify.verify(gold, given, timeout_seconds=None)))


def _find_answer(text: str) -> str:
    r"""Cut a text to "\boxed{...}" of its last box with content; without a box return the whole text.

    math_verify makes one set of neighbouring boxes, so an answer that corrects itself would be wrong. It also misreads a space
    before the brace, a full stop inside, and a space between the digits of a number; these are left out.

    Examples: "\boxed{4}, no, \boxed {5.}, so \boxed{}" gives "\boxed{5}". A last box that is not closed, or only empty boxes,
    give "".
    """
    boxes = list(_BOX.finditer(text))
    # An \fbox may also frame what is no answer, such as Q.E.D.
    boxes = [box for box in boxes if box[0].startswith(r"\boxed")] or boxes
    if not boxes:
        return _SPACED_DIGITS.sub("", text)
    contents = (_read_box(text, box.end()) for box in reversed(boxes))
    content = next((each for each in contents if each is None or _EMPTY.sub("", each)), None)
    if content is None:
        return ""
    return rf"\boxed{{{_clean_formula(content)}}}"


def _clean_formula(formula: str) -> str:
    r"""Leave out the spaces between the groups of a number, ties and a full stop at the end. Example: "10 000." gives "10000"."""
    joined = _GROUPED_NUMBER.sub(lambda number: number[0].replace(" ", ""), _SPACED_DIGITS.sub("", formula))
    return _FULL_STOP.sub("", joined.replace("~", " "))


def _read_box(text: str, start: int) -> str | None:
    r"""Return the content of the box whose command ends at `start`; None if its brace is not closed.

    Without a brace the content reaches to the next space, for example "5" of "\boxed 5 since 2 + 3 = 5".
    """
    if not text.startswith("{", start):
        match = _BARE_CONTENT.match(text, start)
        return match[0].rstrip(".,;:") if match else ""
    depth = 0
    for sign in _BRACES.finditer(text, start):
        depth += (sign[0] == "{") - (sign[0] == "}")
        if depth == 0:
            return text[start + 1 : sign.start()]
    return None


class GuessScorer:
    """Scorer: 1 if the policy's last message guesses the right number, else 0; how many guesses it took does not count."""

    name = "guess"
    version = "1"

    def score(self, candidate: Candidate) -> Reward:
        is_won = candidate.is_complete and candidate.answer == f"{candidate.example['answer']}?"
        return Reward(float(is_won), {"won": float(is_won)})


class EnvironmentScorer:
    """Scorer: the reward that the environment reported in outcome["reward"].

    Numbers in outcome["rewards"] and outcome["metrics"] are its components. Numbers in a list outcome["turn_rewards"] are the rewards
    of its turns; without outcome["reward"] their sum is that of the trajectory.

    An outcome with an "error" and no reward, which the environment could not score, gives a failed score.

    Example: an episode that ended with {"reward": 0.5, "metrics": {"tool_calls": 2}} gets reward 0.5.
    """

    name = "environment"
    version = "1"

    async def score(self, candidate: Candidate) -> Reward:
        """Return the reward and the components in a candidate's outcome.

        Raises:
            ScoreError: the outcome has no reward.
        """
        # Asynchronous scorers run on the event loop: nothing is computed here that would need a worker process.
        reward = candidate.outcome.get("reward")
        turns = candidate.outcome.get("turn_rewards")
        if reward is None and turns is None and (error := candidate.outcome.get("error")):
            raise ScoreError(f"environment {candidate.env} could not score it: {error}")
        is_known = isinstance(reward, SupportsFloat) or (reward is None and turns is not None)
        if not is_known or not isinstance(turns, Sequence | None):
            names = ", ".join(sorted(candidate.outcome)) or "none"
            raise ScoreError(
                f"expected a number as `reward` or a list as `turn_rewards` in the outcome of environment {candidate.env}, got "
                f"{reward!r} and {turns!r:.200}; "
                f"the outcome's fields: {names}"
            )
        components = {
            str(name): float(value)
            for part in ("rewards", "metrics")
            if isinstance(values := candidate.outcome.get(part), Mapping)
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        value = float(reward) if isinstance(reward, SupportsFloat) else None
        return Reward(value, components, turns=turns)
