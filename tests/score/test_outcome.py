"""Advantages, and why a group is left out."""

import numpy as np
import pytest

from rollmill.tasks.score.advantages import mean, mean_std
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.group_outcomes import (
    DROPPED_BY_SCORER,
    NO_FINITE_ADVANTAGE,
    NO_REWARD_SPREAD,
    NOT_WHOLE,
    TOO_FEW_SURVIVORS,
    GroupOutcome,
    Survivor,
    batch_rows,
    compute_advantages,
)


def compute_outcome(rewards: list[float], group: int = 0, **settings: object) -> GroupOutcome:
    (outcome,) = compute_outcomes([(reward, 0) for reward in rewards], group, **settings)
    return outcome


def compute_outcomes(
    scored: list[tuple[float, int]], group: int = 0, *, dropped: int = 0, **settings: object
) -> tuple[GroupOutcome, ...]:
    survivors = tuple(
        Survivor(f"r.{group}.{i}.0", i, "addition", 5, reward, subgroup)
        for i, (reward, subgroup) in enumerate(scored)
    )
    config = ScoreConfig.model_validate(settings)
    return compute_advantages(
        config, group=group, env="addition", expected=4, survivors=survivors, dropped=dropped
    )


def test_advantages_are_rewards_minus_the_mean_of_the_survivors() -> None:
    assert mean(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_advantages_over_the_deviation_have_deviation_one() -> None:
    assert mean_std(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == pytest.approx([1, -1, -1, 1], abs=1e-5)


def test_a_group_with_too_few_survivors_is_left_out_with_its_reason() -> None:
    assert compute_outcome([1.0]).reason == TOO_FEW_SURVIVORS
    assert compute_outcome([]).reason == TOO_FEW_SURVIVORS


def test_a_group_without_spread_is_left_out_with_its_reason() -> None:
    assert compute_outcome([0.1, 0.1, 0.1]).reason == NO_REWARD_SPREAD


@pytest.mark.parametrize("settings", [{"advantage": "zero"}, {"train_without_spread": True}])
def test_a_group_without_spread_is_trained_on_where_something_else_trains_it(
    settings: dict[str, object],
) -> None:
    outcome = compute_outcome([0.1, 0.1, 0.1], **settings)
    assert (outcome.reason, outcome.in_batch.all(), outcome.advantages.any()) == ("", True, False)


def test_zero_advantages_leave_rewards_as_they_are() -> None:
    outcome = compute_outcome([1.0, 0.0], advantage="zero")
    assert (outcome.reason, outcome.advantages.tolist()) == ("", [0.0, 0.0])
    assert [each.reward for each in outcome.survivors] == [1.0, 0.0]


@pytest.mark.parametrize("advantage", ["mean", "mean_std", "planted_scorers:not_finite"])
def test_a_group_without_finite_advantages_is_left_out_with_its_reason(advantage: str) -> None:
    outcome = compute_outcome([1.7e308, 1.7e308, -1.0], advantage=advantage)
    assert (outcome.reason, outcome.advantages.tolist()) == (NO_FINITE_ADVANTAGE, [0.0, 0.0, 0.0])


def test_an_advantage_that_no_float32_holds_is_not_finite() -> None:
    assert compute_outcome([1e39, 0.0]).reason == NO_FINITE_ADVANTAGE
    assert compute_outcome([1e38, 0.0]).reason == ""


def test_a_partial_group_is_left_out_when_whole_ones_are_asked_for() -> None:
    assert compute_outcome([1.0, 0.0, 0.0], min_group_size=0).reason == NOT_WHOLE
    assert compute_outcome([1.0, 0.0, 0.0, 0.0], min_group_size=0).reason == ""


def test_a_group_that_its_scorer_dropped_says_so() -> None:
    (outcome,) = compute_outcomes([], dropped=4)
    assert outcome.reason == DROPPED_BY_SCORER


def test_a_split_group_has_a_baseline_for_each_part() -> None:
    first, second = compute_outcomes([(1.0, 0), (0.0, 0), (5.0, 1), (3.0, 1)])
    assert (first.advantages.tolist(), second.advantages.tolist()) == ([0.5, -0.5], [1.0, -1.0])
    assert (first.subgroup, second.subgroup) == (0, 1)


def test_a_part_of_a_split_group_that_is_too_small_is_left_out_alone() -> None:
    first, second = compute_outcomes([(1.0, 0), (0.0, 0), (5.0, 1)])
    assert (first.reason, second.reason) == ("", TOO_FEW_SURVIVORS)


@pytest.mark.parametrize(("advantage", "reason"), [("none", ""), ("zero", ""), ("mean", TOO_FEW_SURVIVORS)])
def test_one_trajectory_is_enough_of_a_whole_group_where_no_other_is_its_baseline(
    advantage: str, reason: str
) -> None:
    scored = [(1.0, 0), (0.0, 0), (0.5, 0), (5.0, 1)]
    _, single = compute_outcomes(scored, advantage=advantage, min_group_size=0)
    assert single.reason == reason


def test_the_batch_holds_the_groups_that_are_in_by_group_and_sample_with_their_advantages() -> None:
    rows = batch_rows(
        "r",
        3,
        [
            compute_outcome([1.0, 0.0], group=7),
            compute_outcome([1.0, 1.0], group=6),
            compute_outcome([0.0, 1.0], group=5),
        ],
        "addition@1",
    )
    assert set(rows.column("scorer").to_pylist()) == {"addition@1"}
    assert rows.column("trajectory_id").to_pylist() == ["r.5.0.0", "r.5.1.0", "r.7.0.0", "r.7.1.0"]
    assert rows.column("advantage").to_pylist() == [-0.5, 0.5, 0.5, -0.5]
    assert rows.column("order").to_pylist() == [0, 1, 2, 3]


def test_a_step_without_any_spread_has_an_empty_batch_of_the_right_schema() -> None:
    assert batch_rows("r", 0, [compute_outcome([1.0, 1.0])], "addition@1").num_rows == 0
