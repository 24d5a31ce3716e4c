"""The estimated gain of a step is the importance-weighted mean reward, whatever the scale of the scorer."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rollmill.tasks.score.step_estimate import GroupRewards, estimate_step

NAN = float("nan")


def group(advantages: list[float], *rewards: list[float]) -> GroupRewards:
    return GroupRewards(np.array(advantages), np.array(rewards).T)


def test_the_gain_is_that_of_the_weighted_rewards_and_groups_that_are_not_trained_on_gain_nothing() -> None:
    found = estimate_step([group([0.5, -0.5], [1, 0], [0, 2]), group([0.0, 0.0], [1, 1], [3, 5])])

    weight = math.e / (math.e + 1 / math.e)
    assert found.gains == pytest.approx([(weight - 0.5) / 2, -2 * (weight - 0.5) / 2])
    assert found.n_effective == pytest.approx(1 / (weight**2 + (1 - weight) ** 2) + 2)
    assert (found.n_trained, found.n) == (1, 4)
    assert found.errors == pytest.approx([(weight - 0.5) / 2, 2 * (weight - 0.5) / 2])


def test_a_trajectory_without_a_reward_counts_for_none() -> None:
    found = estimate_step([group([1.0, -1.0, 0.0], [4, NAN, 4], [NAN, NAN, NAN])])

    assert found.gains == pytest.approx([0.0, 0.0])


ADVANTAGES = arrays(np.float64, (5, 4), elements=st.floats(-3, 3).map(lambda each: round(each, 3)))


@given(ADVANTAGES, st.floats(1e-3, 1e3))
def test_the_scale_of_the_advantages_does_not_matter(advantages: np.ndarray, scale: float) -> None:
    groups, scaled = (
        [GroupRewards(rows * factor, rows[:, None]) for rows in advantages] for factor in (1.0, scale)
    )
    one, other = estimate_step(groups), estimate_step(scaled)

    assert one.gains == pytest.approx(other.gains, abs=1e-9)
    assert one.n_effective == pytest.approx(other.n_effective)
    # A step towards larger advantages cannot lose where they are the rewards.
    assert one.gains[0] >= -1e-12


def test_no_groups_gain_nothing() -> None:
    assert estimate_step([]).n == 0
