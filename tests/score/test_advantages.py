"""Advantage functions by name."""

import numpy as np
import pytest

from tasks.errors import ConfigError, ScoreError
from tasks.score.advantages import advantage_of, mean
from tasks.score.check import check_scorer
from tasks.score.config import ScoreConfig

REWARDS = np.array([1.0, 0.0])


def test_a_registered_name_is_a_function_of_ours() -> None:
    assert advantage_of("mean") is mean


def test_a_function_may_give_a_list() -> None:
    assert advantage_of("planted_scorers:twice")(REWARDS).tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("name", "told"),
    [("too_few", "expected 2 advantages"), ("CannotBeMade", "raised TypeError")],
)
def test_what_is_no_list_of_advantages_is_an_error_that_names_the_function(name: str, told: str) -> None:
    with pytest.raises(ScoreError, match=told) as raised:
        advantage_of(f"planted_scorers:{name}")(REWARDS)
    assert f"planted_scorers:{name}" in str(raised.value)


def test_a_function_cannot_change_the_rewards() -> None:
    rewards = REWARDS.copy()
    advantage_of("planted_scorers:doubles_in_place")(rewards)
    assert rewards.tolist() == REWARDS.tolist()


@pytest.mark.parametrize("name", ["means", "planted_scorers:absent", "planted_scorers:__doc__"])
def test_a_function_that_is_not_there_is_a_wrong_setting_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"score\.advantage = .*mean, mean_std"):
        check_scorer(ScoreConfig(advantage=name))
