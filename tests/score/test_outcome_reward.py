"""The reward that an environment said itself."""

import pytest

from rollmill.tasks.errors import ScoreError
from rollmill.tasks.score.scorer import Candidate
from rollmill.tasks.score.scorers.built_in import EnvironmentScorer

SAID = {"reward": 1.5, "rewards": {"right": 1.0, "short": 0.5}, "metrics": {"turns": 3, "unknown": None}}


async def test_rewards_and_metrics_that_are_numbers_are_the_components() -> None:
    reward = await EnvironmentScorer().score(Candidate("t", {}, [], True, SAID))
    assert reward.value == 1.5
    assert reward.components == {"right": 1.0, "short": 0.5, "turns": 3.0}


async def test_what_the_environment_could_not_score_says_why() -> None:
    candidate = Candidate("t", {}, [], True, {"error": "TaskError: the judge is out"}, "verifiers:house")
    with pytest.raises(ScoreError, match="verifiers:house could not score it: TaskError: the judge is out"):
        await EnvironmentScorer().score(candidate)


async def test_an_environment_may_report_rewards_of_turns() -> None:
    reward = await EnvironmentScorer().score(Candidate("t", {}, [], True, {"turn_rewards": [0.5, 1]}))
    assert (reward.value, list(reward.turns)) == (None, [0.5, 1])
    said = {"turn_rewards": [0.5, 1], "reward": 2}
    assert (await EnvironmentScorer().score(Candidate("t", {}, [], True, said))).value == 2.0
    with pytest.raises(ScoreError, match="a number as `reward` or a list as `turn_rewards`"):
        await EnvironmentScorer().score(Candidate("t", {}, [], True, {"turn_rewards": 3}))
