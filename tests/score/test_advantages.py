"""Advantage functions by name."""

import numpy as np
import pytest

from rollmill.tasks.errors import ConfigError, ScoreError
from rollmill.tasks.score.advantages import mean, mean_std, normalize_over_batch, resolve_advantage, rloo
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.group_outcomes import (
    NO_REWARD_SPREAD,
    GroupOutcome,
    Survivor,
    compute_advantages,
    compute_batch_advantages,
)
from rollmill.tasks.score.terms import check_scorer
from rollmill.tasks.user_code.plug_in import PlugIn

REWARDS = np.array([1.0, 0.0])


def test_a_registered_name_is_a_built_in_function() -> None:
    assert resolve_advantage(PlugIn(name="mean")).of_group is mean


def test_a_function_may_give_a_list() -> None:
    assert resolve_advantage(PlugIn(name="planted_scorers:twice")).of_group(REWARDS).tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [("too_few", "expected 2 advantages"), ("CannotBeMade", "raised TypeError")],
)
def test_a_result_that_is_no_list_of_advantages_is_an_error_that_names_the_function(
    name: str, message: str
) -> None:
    with pytest.raises(ScoreError, match=message) as raised:
        resolve_advantage(PlugIn(name=f"planted_scorers:{name}")).of_group(REWARDS)
    assert f"planted_scorers:{name}" in str(raised.value)


def test_a_function_cannot_change_the_rewards() -> None:
    rewards = REWARDS.copy()
    resolve_advantage(PlugIn(name="planted_scorers:doubles_in_place")).of_group(rewards)
    assert rewards.tolist() == REWARDS.tolist()


@pytest.mark.parametrize("name", ["means", "planted_scorers:absent", "planted_scorers:__doc__"])
def test_a_function_that_is_not_there_is_a_wrong_setting_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"score\.advantage = .*mean, mean_std"):
        check_scorer(ScoreConfig(scorer="exact", advantage=name))


def verl_rloo(rewards: np.ndarray) -> np.ndarray:
    """verl 0.6, trainer/ppo/core_algos.py, compute_rloo_outcome_advantage, of one group."""
    n = len(rewards)
    return np.array([r * n / (n - 1) - rewards.mean() * n / (n - 1) for r in rewards])


def openrlhf_normalized(advantages: list[float], tokens: list[int]) -> list[float]:
    """OpenRLHF 0.8, experience_maker.py, compute_advantages_and_returns: over all action tokens, token by token."""
    by_token = np.repeat(advantages, tokens)
    mean = by_token.sum() / len(by_token)
    rstd = 1 / np.sqrt(max(((by_token - mean) ** 2).sum() / len(by_token), 1e-8))
    firsts = np.cumsum([0, *tokens[:-1]])
    return [(by_token[first] - mean) * rstd for first in firsts]


def test_leave_one_out_is_each_reward_minus_the_mean_of_the_others() -> None:
    rewards = np.array([1.0, 0.25, -3.0, 0.5])
    by_hand = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)]

    assert rloo(rewards) == pytest.approx(by_hand)
    assert rloo(rewards) == pytest.approx(verl_rloo(rewards))


def test_over_the_groups_deviation_is_trl_s_advantage_up_to_the_deviation_of_a_sample() -> None:
    """TRL 0.24, grpo_trainer.py: (r - mean) / (std + 1e-4) with torch's std, that of a sample."""
    rewards = np.array([1.0, 0.25, -3.0, 0.5])
    trl = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)

    assert mean_std(rewards) * np.sqrt(3 / 4) == pytest.approx(trl, rel=1e-3)


def test_the_batchs_part_is_over_all_tokens() -> None:
    advantages, tokens = [0.5, -0.5, 0.75, -0.25, -0.5], [3, 18, 7, 1, 40]

    found = normalize_over_batch(np.array(advantages), np.array(tokens))

    assert found == pytest.approx(openrlhf_normalized(advantages, tokens))


def test_advantages_that_are_all_alike_stay_finite_over_the_batch() -> None:
    assert normalize_over_batch(np.zeros(3), np.array([1, 2, 3])).tolist() == [0.0, 0.0, 0.0]


def test_a_batch_without_tokens_keeps_its_advantages() -> None:
    assert normalize_over_batch(np.array([0.5, -0.5]), np.array([0, 0])).tolist() == [0.5, -0.5]


def compute_outcome(advantage: str, group: int, rewards: list[float], **settings: object) -> GroupOutcome:
    survivors = tuple(
        Survivor(f"{group}.{i}", i, "addition", 3 + i, reward, 0, i == 1) for i, reward in enumerate(rewards)
    )
    config = ScoreConfig.model_validate({"advantage": advantage} | settings)
    (outcome,) = compute_advantages(
        config, group=group, env="addition", expected=len(rewards), survivors=survivors
    )
    return outcome


def test_a_batchs_part_sees_what_is_in_the_batch_in_its_order_and_changes_nothing_else() -> None:
    config = ScoreConfig(advantage="reinforce_pp", train_truncated=False)
    second, first, short = (
        compute_outcome("reinforce_pp", group, rewards, train_truncated=False)
        for group, rewards in ((7, [1.0, 0.0, 0.5]), (2, [0.0, 1.0, 1.0]), (3, [1.0]))
    )
    found = compute_batch_advantages(config, [second, first, short])
    raw = [first.advantages[0], first.advantages[2], second.advantages[0], second.advantages[2]]

    assert [outcome.group for outcome in found] == [2, 3, 7]
    trained = [advantage for outcome in found for _, advantage, _ in outcome.trained]
    assert trained == pytest.approx(
        openrlhf_normalized([float(each) for each in raw], [3, 5, 3, 5]), rel=1e-5
    )
    assert found[0].advantages[1] == first.advantages[1]
    assert (
        compute_batch_advantages(config, [first, short, second])[2].advantages.tobytes()
        == found[2].advantages.tobytes()
    )


def test_an_advantage_of_another_package_may_have_a_batchs_part() -> None:
    config = ScoreConfig(advantage="planted_scorers:CENTRED")
    outcomes = [
        compute_outcome("planted_scorers:CENTRED", 0, [3.0, 1.0]),
        compute_outcome("planted_scorers:CENTRED", 1, [8.0, 8.0]),
    ]

    assert [each.advantages.tolist() for each in compute_batch_advantages(config, outcomes)] == [
        [-2.0, -4.0],
        [3.0, 3.0],
    ]


def test_a_batchs_part_that_gives_no_finite_numbers_is_an_error_that_names_it() -> None:
    config = ScoreConfig(advantage="planted_scorers:OVERFLOWS")
    with pytest.raises(ScoreError, match="planted_scorers:OVERFLOWS"):
        compute_batch_advantages(config, [compute_outcome("planted_scorers:OVERFLOWS", 0, [3.0, 1.0])])


@pytest.mark.parametrize(("advantage", "expected"), [("none", [1.0, 1.0]), ("reinforce_pp", [0.0, 0.0])])
def test_equal_rewards_are_trained_on_where_they_are_informative(
    advantage: str, expected: list[float]
) -> None:
    outcome = compute_outcome(advantage, 0, [1.0, 1.0])
    assert (outcome.reason, outcome.advantages.tolist()) == ("", expected)
    assert (
        compute_outcome("mean", 0, [1.0, 1.0]).reason
        == compute_outcome("rloo", 0, [1.0, 1.0]).reason
        == NO_REWARD_SPREAD
    )
