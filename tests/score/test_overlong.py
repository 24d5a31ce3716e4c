"""Overlong reward shaping and filtering."""

import numpy as np
import pytest

from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.group_outcomes import (
    ALL_TRUNCATED,
    NO_REWARD_SPREAD,
    GroupOutcome,
    Survivor,
    batch_rows,
    compute_advantages,
    overlong_penalties,
)


def compute_outcome(rows: list[tuple[float, int, bool]], **settings: object) -> GroupOutcome:
    """A group of (reward, sampled tokens, whether it was truncated)."""
    survivors = tuple(
        Survivor(f"r.0.{i}.0", i, "addition", n_tokens, reward, 0, is_truncated)
        for i, (reward, n_tokens, is_truncated) in enumerate(rows)
    )
    config = ScoreConfig.model_validate(settings)
    (outcome,) = compute_advantages(config, group=0, env="addition", expected=4, survivors=survivors)
    return outcome


def test_the_loss_of_reward_is_that_of_equation_13() -> None:
    # L_max 20480 and L_cache 4096, as in the paper: 0 to 16384, then a line to -1.
    config = ScoreConfig(overlong_tokens=(16384, 20480))
    lengths = np.array([0, 16384, 16385, 17408, 18432, 20479, 20480, 20481, 99999])
    expected = [0.0, 0.0, -1 / 4096, -0.25, -0.5, -4095 / 4096, -1.0, -1.0, -1.0]
    assert overlong_penalties(config, lengths).tolist() == expected


def test_without_a_limit_no_length_costs_anything() -> None:
    assert overlong_penalties(ScoreConfig(), np.array([0, 10**9])).tolist() == [0.0, 0.0]


def test_advantages_are_taken_of_shaped_rewards_and_the_batch_keeps_the_scorers() -> None:
    # Rewards 1, 1, 0, 0 and losses 0, -.5, 0, -1 (limit 10, cache 4): 1, .5, 0, -1, whose mean is .125.
    rows = [(1.0, 6, False), (1.0, 8, False), (0.0, 2, False), (0.0, 10, False)]
    outcome = compute_outcome(rows, overlong_tokens=(6, 10))
    assert outcome.advantages.tolist() == [0.875, 0.375, -0.125, -1.125]
    batch = batch_rows("r", 0, [outcome], "addition@1")
    assert batch.column("reward").to_pylist() == [1.0, 1.0, 0.0, 0.0]


def test_lengths_alone_can_give_a_group_spread() -> None:
    rows = [(1.0, 6, False), (1.0, 8, False)]
    assert compute_outcome(rows).reason == NO_REWARD_SPREAD
    assert compute_outcome(rows, overlong_tokens=(6, 10)).reason == ""


def test_truncated_trajectories_count_in_the_baseline_and_are_not_in_the_batch() -> None:
    # Rewards 1, 0 and a truncated -4: the mean is -1.
    outcome = compute_outcome([(1.0, 5, False), (-4.0, 9, True), (0.0, 5, False)], train_truncated=False)
    batch = batch_rows("r", 0, [outcome], "addition@1")
    assert batch.column("sample").to_pylist() == [0, 2]
    assert batch.column("advantage").to_pylist() == [2.0, 1.0]
    assert batch.column("order").to_pylist() == [0, 1]


@pytest.mark.parametrize(("trains", "reason", "n_rows"), [(True, "", 2), (False, ALL_TRUNCATED, 0)])
def test_a_group_of_truncated_trajectories_is_left_out_with_its_reason(
    trains: bool, reason: str, n_rows: int
) -> None:
    outcome = compute_outcome([(1.0, 9, True), (0.0, 9, True)], train_truncated=trains)
    assert (outcome.reason, len(outcome.survivors)) == (reason, 2)
    assert batch_rows("r", 0, [outcome], "addition@1").num_rows == n_rows
