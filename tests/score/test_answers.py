"""Scorers that compare an answer with a reference, and the one that asks the environment."""

from collections.abc import Callable, Sequence

import pytest

from rollmill.tasks.errors import ScoreError
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scorer import Candidate
from rollmill.tasks.score.scorers.built_in import EnvironmentScorer, ExactScorer, MathScorer
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.store.rows import Rows, column_values


def candidate(answer: str, reference: object = "2", **outcome: object) -> Candidate:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    return Candidate("id", {"answer": reference}, messages, True, outcome, env="games")


def test_an_answer_is_the_last_that_the_policy_said() -> None:
    messages = [{"role": "assistant", "content": "7?"}, {"role": "user", "content": "lower"}]
    assert Candidate("id", {}, messages, True).answer == "7?"
    assert Candidate("id", {}, messages[1:], True).answer == ""


@pytest.mark.parametrize(("answer", "reward"), [("2", 1.0), (" 2\n", 1.0), ("2.0", 0.0), ("", 0.0)])
def test_exact_takes_the_reference_and_white_space_around_it(answer: str, reward: float) -> None:
    assert ExactScorer().score(candidate(answer, 2)).value == reward


def test_a_reference_that_is_missing_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(ScoreError, match="there are: problem"):
        ExactScorer().score(Candidate("id", {"problem": "1"}, [], True))


@pytest.mark.parametrize(
    ("reference", "answer", "reward"),
    [
        ("1/2", r"so it is $\frac{2}{4}$", 1.0),
        ("1/2", r"\boxed{0.5}", 1.0),
        (r"Thus \boxed{x^2+1}.", "$1+x^2$", 1.0),
        ("(1,2)", r"\boxed{(1,2)}", 1.0),
        ("1,234", "that makes 1234", 1.0),
        ("42", "that makes 43", 0.0),
        ("42", "I do not know", 0.0),
    ],
)
def test_math_compares_what_is_meant(reference: str, answer: str, reward: float) -> None:
    assert MathScorer().score(candidate(answer, reference)).value == reward


def test_a_reference_that_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(ScoreError, match="no mathematical expression"):
        MathScorer().score(candidate("1", ""))


@pytest.mark.slow
async def test_math_runs_in_a_worker_process(rollouts: Callable[[Sequence[str]], Rows]) -> None:
    async with Scoring(ScoreConfig(scorer="math"), "run") as scoring:
        scores = await scoring.score(rollouts([r"\boxed{\frac{4}{2}}", "3"]), step=0)
    assert column_values(scores, "reward") == [1.0, 0.0]


async def test_environment_takes_the_reward_and_the_numbers_among_the_metrics() -> None:
    metrics = {"turns": 2, "won": True, "name": "x"}
    reward = await EnvironmentScorer().score(candidate("", reward=0.5, metrics=metrics))
    assert (reward.value, reward.components) == (0.5, {"turns": 2.0, "won": 1.0})


async def test_an_outcome_without_reward_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(ScoreError, match=r"environment games, got None.*fields: won"):
        await EnvironmentScorer().score(candidate("", won=True))
