"""Advantages, and why a group is left out."""

import numpy as np
import pytest

from tasks.score.advantages import mean, mean_std
from tasks.score.config import ScoreConfig
from tasks.score.outcome import (
    NO_REWARD_SPREAD,
    TOO_FEW_SURVIVORS,
    GroupOutcome,
    Survivor,
    batch_rows,
    judge_group,
)


def judged(rewards: list[float], group: int = 0, **settings: object) -> GroupOutcome:
    survivors = tuple(
        Survivor(f"r.{group}.{i}.0", i, "addition", 5, reward) for i, reward in enumerate(rewards)
    )
    config = ScoreConfig.model_validate(settings)
    return judge_group(config, group=group, env="addition", expected=4, survivors=survivors)


def test_advantages_are_rewards_minus_the_mean_of_the_survivors() -> None:
    assert mean(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_advantages_over_the_deviation_have_deviation_one() -> None:
    assert mean_std(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == pytest.approx([1, -1, -1, 1], abs=1e-5)


def test_a_group_with_too_few_survivors_is_left_out_with_its_reason() -> None:
    assert judged([1.0]).reason == TOO_FEW_SURVIVORS
    assert judged([]).reason == TOO_FEW_SURVIVORS


def test_a_group_without_spread_is_left_out_with_its_reason() -> None:
    assert judged([0.1, 0.1, 0.1]).reason == NO_REWARD_SPREAD


def test_the_batch_holds_the_groups_that_are_in_by_group_and_sample_with_their_advantages() -> None:
    rows = batch_rows(
        "r", 3, [judged([1.0, 0.0], group=7), judged([1.0, 1.0], group=6), judged([0.0, 1.0], group=5)]
    )
    assert rows.column("trajectory_id").to_pylist() == ["r.5.0.0", "r.5.1.0", "r.7.0.0", "r.7.1.0"]
    assert rows.column("advantage").to_pylist() == [-0.5, 0.5, 0.5, -0.5]
    assert rows.column("order").to_pylist() == [0, 1, 2, 3]


def test_a_step_without_any_spread_has_an_empty_batch_of_the_right_schema() -> None:
    assert batch_rows("r", 0, [judged([1.0, 1.0])]).num_rows == 0
