"""Scorers of the calculator and of the guessing game."""

import pytest

from rollmill.tasks.score.scorer import Candidate
from rollmill.tasks.score.scorers.built_in import CalculatorScorer, CalculatorTurnsScorer, GuessScorer


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


@pytest.mark.parametrize(
    ("result", "answer", "turns"),
    [
        ("935|", "935", [0.9, 0.1]),
        ("935|", "936", [0.9, -0.8]),
        ("936|", "936", [0.0, 0.1]),
        ("936|", "935", [0.0, 1.0]),
        ("", "935", [1.0]),
    ],
)
def test_calculator_turns_blames_the_turn_that_went_wrong(
    result: str, answer: str, turns: list[float]
) -> None:
    said = [("user", "?"), ("assistant", "<17*55>"), ("tool", result), ("assistant", answer)]
    messages = [
        {"role": role, "content": text} for role, text in said if result or text not in ("<17*55>", "")
    ]
    places = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    given = Candidate(
        "t", {"answer": "935"}, messages, True, turn_messages=places, turn_tokens=[7] * len(places)
    )
    reward = CalculatorTurnsScorer().score(given)
    assert (list(reward.turns), reward.value) == (pytest.approx(turns), pytest.approx(sum(turns)))
    assert given.answers[-1] == answer


@pytest.mark.parametrize(("answer", "reward"), [("26?", 1.0), ("27?", 0.0), ("26", 0.0)])
def test_guess_pays_for_winning_alone(answer: str, reward: float) -> None:
    assert GuessScorer().score(candidate(answer, "26")).value == reward
