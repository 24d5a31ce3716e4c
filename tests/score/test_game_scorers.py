"""Scorers of the calculator and of the guessing game."""

import pytest

from rollmill.tasks.score.scorer import Candidate
from rollmill.tasks.score.scorers.built_in import CalculatorScorer, GuessScorer


def candidate(answer: str, reference: str, *, is_complete: bool = True) -> Candidate:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    return Candidate("t", {"answer": reference}, messages, is_complete)


@pytest.mark.parametrize(
    ("answer", "is_complete", "reward"),
    [("935", True, 1.0), ("-5", True, 0.1), ("<17*55>", True, 0.0), ("", True, 0.0), ("935", False, 0.0)],
)
def test_calculator_pays_for_a_number_and_for_the_right_one(
    answer: str, is_complete: bool, reward: float
) -> None:
    assert CalculatorScorer().score(candidate(answer, "935", is_complete=is_complete)).value == reward


@pytest.mark.parametrize(("answer", "reward"), [("26?", 1.0), ("27?", 0.0), ("26", 0.0)])
def test_guess_pays_for_winning_alone(answer: str, reward: float) -> None:
    assert GuessScorer().score(candidate(answer, "26")).value == reward
