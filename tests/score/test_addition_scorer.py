"""The addition scorer."""

import pytest

from rollmill.tasks.score.scorer import Candidate
from rollmill.tasks.score.scorers.built_in import AdditionScorer


def reward(answer: str, *, is_complete: bool = True) -> float:
    messages = [{"role": "user", "content": "47+38="}, {"role": "assistant", "content": answer}]
    return AdditionScorer().score(Candidate("id", {"answer": "85"}, messages, is_complete)).value


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("85", 1.0),
        ("[7+8=15 4+3+1=8]85", 1.0),
        ("84", 0.1),
        ("[7+8=15]84", 0.1),
        ("[7+8=15 85", 0.0),
        ("", 0.0),
        ("85 ", 0.0),
        ("085", 0.1),
    ],
)
def test_format_earns_a_tenth_and_the_right_number_the_rest(answer: str, expected: float) -> None:
    assert reward(answer) == pytest.approx(expected)


def test_an_answer_that_was_cut_off_earns_nothing() -> None:
    assert reward("85", is_complete=False) == 0.0
