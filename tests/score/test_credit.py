"""Credit by turn and by token, against a reference that is written out position by position."""

import math
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rollmill.tasks.errors import ConfigError, ScoreError
from rollmill.tasks.score.advantages import STD_EPSILON, Advantage
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.credit import PositionRewards, compute_token_advantages, returns_to_go
from rollmill.tasks.score.group_outcomes import (
    NO_FINITE_ADVANTAGE,
    NO_REWARD_SPREAD,
    GroupOutcome,
    Survivor,
    batch_rows,
    compute_advantages,
    compute_batch_advantages,
)
from rollmill.tasks.score.terms import check_scorer

LEVELS = ("turn", "token")
REWARDS = st.sampled_from([0.0, 0.5, 1.0, -2.0])


@st.composite
def survivors(draw: st.DrawFn) -> tuple[Survivor, ...]:
    """A group whose trajectories have rewards at three levels; the turns of some are stored in another order."""
    found = []
    for sample in range(draw(st.integers(2, 4))):
        tokens = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        order = draw(st.permutations(range(len(tokens))))
        starts = [10 * order.index(turn) for turn in range(len(tokens))]
        of_turns = draw(st.lists(REWARDS, min_size=len(tokens), max_size=len(tokens)))
        of_tokens = draw(st.lists(REWARDS, min_size=sum(tokens), max_size=sum(tokens)))
        level = draw(st.sampled_from(["trajectory", *LEVELS]))
        found.append(
            Survivor(
                trajectory_id=f"r.0.{sample}.0",
                sample=sample,
                env="calculator",
                n_tokens=sum(tokens),
                reward=draw(REWARDS),
                turn_starts=tuple(starts),
                turn_tokens=tuple(tokens),
                turn_rewards=tuple(of_turns) if level == "turn" else (),
                token_rewards=tuple(of_tokens) if level == "token" else (),
            )
        )
    return tuple(found)


def naive_rewards(each: Survivor, level: str) -> list[float]:
    """Rewards of a trajectory at its turns or tokens, in the order in which they were sampled."""
    turn_of_token = [turn for turn, n in enumerate(each.turn_tokens) for _ in range(n)]
    found = [0.0] * (len(each.turn_tokens) if level == "turn" else each.n_tokens)
    if not found:
        return found
    if each.token_rewards:
        for token, reward in enumerate(each.token_rewards):
            found[turn_of_token[token] if level == "turn" else token] += reward
    elif each.turn_rewards:
        for turn, reward in enumerate(each.turn_rewards):
            last = sum(each.turn_tokens[: turn + 1]) - 1
            found[turn if level == "turn" else max(last, 0)] += reward
    else:
        found[-1] += each.reward
    return found


def naive_baseline(name: str, own: float, others: Sequence[float]) -> float:
    """The advantage of one return among those at the same position, the own one included in `others`."""
    mean = sum(others) / len(others)
    if name == "none":
        return own
    if len(others) == 1 or max(others) == min(others):
        return 0.0
    if name == "rloo":
        return own - (sum(others) - own) / (len(others) - 1)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in others) / len(others))
    return (own - mean) / (deviation + STD_EPSILON if name == "mean_std" else 1.0)


def naive_advantages(group: Sequence[Survivor], level: str, name: str, discount: float) -> list[list[float]]:
    """Advantages of each trajectory's sampled tokens, in the row's order."""
    returns = [
        [
            sum(discount ** (later - at) * rewards[later] for later in range(at, len(rewards)))
            for at in range(len(rewards))
        ]
        for rewards in (naive_rewards(each, level) for each in group)
    ]
    found = []
    for each, own in zip(group, returns, strict=True):
        compared = [
            naive_baseline(name, value, [other[at] for other in returns if at < len(other)])
            for at, value in enumerate(own)
        ]
        turn_of_token = [turn for turn, n in enumerate(each.turn_tokens) for _ in range(n)]
        values = [
            (each.turn_starts[turn], token, compared[turn if level == "turn" else token])
            for token, turn in enumerate(turn_of_token)
        ]
        found.append([value for *_, value in sorted(values)])
    return found


def outcome_of(group: tuple[Survivor, ...], **settings: object) -> GroupOutcome:
    config = ScoreConfig.model_validate(settings)
    (outcome,) = compute_advantages(config, group=0, env="calculator", expected=len(group), survivors=group)
    return outcome


@given(
    group=survivors(),
    level=st.sampled_from(LEVELS),
    name=st.sampled_from(["none", "mean", "mean_std", "rloo"]),
    discount=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_advantages_by_turn_and_token_are_those_of_a_naive_reference(
    group: tuple[Survivor, ...], level: str, name: str, discount: float
) -> None:
    expected = naive_advantages(group, level, name, discount)
    outcome = outcome_of(group, advantage=name, credit=level, discount=discount)
    if outcome.reason:
        assert outcome.reason == NO_REWARD_SPREAD
        assert not np.any(np.abs(np.concatenate(expected)) > 1e-6)
        return
    for found, wanted, mean in zip(outcome.token_advantages, expected, outcome.advantages, strict=True):
        assert found.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        assert mean == pytest.approx(np.mean(wanted) if wanted else 0.0, rel=1e-5, abs=1e-5)


def test_returns_to_go_of_many_positions_are_discounted_sums() -> None:
    rewards = np.random.default_rng(0).normal(size=(3, 1000))
    expected = np.zeros((3, 1001))
    for place in reversed(range(1000)):
        expected[:, place] = rewards[:, place] + 0.99 * expected[:, place + 1]
    np.testing.assert_allclose(returns_to_go(rewards, 0.99), expected[:, :-1], rtol=1e-12, atol=1e-12)


def make(reward: float, turns: Sequence[float] = (), sample: int = 0) -> Survivor:
    """A trajectory with two turns of 2 and 3 tokens."""
    return Survivor(
        f"r.0.{sample}.0",
        sample,
        "calculator",
        5,
        reward,
        turn_starts=(3, 9),
        turn_tokens=(2, 3),
        turn_rewards=tuple(turns),
    )


def test_the_turn_that_failed_is_blamed_and_not_the_one_before_it() -> None:
    group = (make(1.0, [0.5, 0.5]), make(0.5, [0.5, 0.0], 1))
    outcome = outcome_of(group, credit="turn", discount=0.0)
    assert [each.tolist() for each in outcome.token_advantages] == [
        [0, 0, 0.25, 0.25, 0.25],
        [0, 0, -0.25, -0.25, -0.25],
    ]
    rows = batch_rows("r", 0, [outcome], "s@1")
    assert rows.column("token_advantages").to_pylist() == [each.tolist() for each in outcome.token_advantages]
    assert rows.column("advantage").to_pylist() == pytest.approx([0.15, -0.15])


def test_a_penalty_for_length_counts_at_the_last_turn() -> None:
    group = (make(1.0, [1.0, 0.0]), make(1.0, [1.0, 0.0], 1))
    group = (
        group[0],
        Survivor(**{name: getattr(group[1], name) for name in group[1].__slots__} | {"n_tokens": 5}),
    )
    config = {"credit": "turn", "discount": 0.0, "overlong_tokens": (4, 6)}
    outcome = outcome_of(group, advantage="none", **config)
    assert outcome.token_advantages[0].tolist() == [1, 1, -0.5, -0.5, -0.5]


def test_without_rewards_of_turns_and_discount_every_turn_has_the_trajectorys_advantage() -> None:
    group = (make(1.0), make(0.0, (), 1))
    by_turn = outcome_of(group, credit="turn")
    assert [set(each.tolist()) for each in by_turn.token_advantages] == [{0.5}, {-0.5}]
    assert outcome_of(group).advantages.tolist() == by_turn.advantages.tolist() == [0.5, -0.5]


def test_a_group_without_spread_at_any_turn_and_one_without_finite_advantages_are_left_out() -> None:
    alike = (make(1.0, [1.0, 0.0]), make(1.0, [1.0, 0.0], 1))
    assert outcome_of(alike, credit="turn").reason == NO_REWARD_SPREAD
    # By trajectory they are alike; turn by turn they are not.
    differ = (make(1.0, [1.0, 0.0]), make(1.0, [0.0, 1.0], 1))
    assert outcome_of(differ).reason == NO_REWARD_SPREAD
    assert outcome_of(differ, credit="turn", discount=0.5).reason == ""
    huge = (make(1e39), make(0.0, (), 1))
    assert outcome_of(huge, credit="token").reason == NO_FINITE_ADVANTAGE


def test_sums_of_the_same_rewards_in_another_order_are_no_spread() -> None:
    group = (make(0.6, [0.1 + 0.2, 0.3]), make(0.6, [0.0, 0.6], 1))
    assert 0.1 + 0.2 + 0.3 != 0.6
    assert outcome_of(group, credit="turn").token_advantages[0].tolist()[:2] == [0.0, 0.0]
    same = (make(0.1 + 0.2 + 0.3), make(0.6, (), 1))
    assert outcome_of(same, credit="turn").reason == outcome_of(same).reason == NO_REWARD_SPREAD


def test_a_group_whose_spread_is_among_trajectories_that_are_not_trained_on_is_left_out() -> None:
    right, wrong = make(1.0, [1.0, 1.0], 1), make(0.0, [1.0, 0.0], 2)
    alone = Survivor("r.0.0.0", 0, "e", 2, 1.0, turn_starts=(3,), turn_tokens=(2,), turn_rewards=(1.0,))
    cut = [replace(each, is_truncated=True) for each in (right, wrong)]
    config = {"credit": "turn", "discount": 0.0}
    assert outcome_of((alone, *cut), **config).reason == ""
    assert outcome_of((alone, *cut), **config, train_truncated=False).reason == NO_REWARD_SPREAD


def test_over_the_batch_all_sampled_tokens_have_mean_zero_and_deviation_one() -> None:
    config = ScoreConfig(advantage="reinforce_pp", credit="turn", discount=0.0)
    given = config.model_dump(exclude_unset=True)
    first = outcome_of((make(1.0, [0.5, 0.5]), make(0.5, [0.5, 0.0], 1)), **given)
    second = outcome_of((make(1.0, [0.0, 1.0]), make(0.5, [0.5, 0.0], 1)), **given)
    before = np.concatenate([*first.token_advantages, *second.token_advantages])
    found = compute_batch_advantages(config, [first, second])
    after = np.concatenate([each for outcome in found for each in outcome.token_advantages])
    assert (after.mean(), after.std()) == (pytest.approx(0.0, abs=1e-6), pytest.approx(1.0, rel=1e-5))
    np.testing.assert_allclose(after, (before - before.mean()) / before.std(), rtol=1e-5, atol=1e-6)
    means = [each.mean() for outcome in found for each in outcome.token_advantages]
    assert np.concatenate([each.advantages for each in found]).tolist() == pytest.approx(means, rel=1e-5)


def test_a_function_of_ones_own_sees_rewards_and_ends_by_position() -> None:
    seen = []

    def ranked(rewards: np.ndarray, present: np.ndarray) -> np.ndarray:
        seen.append((rewards.tolist(), present.tolist()))
        return rewards * 2.0 + ~present

    short = PositionRewards(1.0, 2, (3,), (2,), (4.0,))
    long = PositionRewards(1.0, 5, (3, 9), (2, 3), (1.0, 2.0))
    found = compute_token_advantages(Advantage(lambda _: _, by_position=ranked), [short, long], "turn", 1.0)
    assert seen == [([[4.0, 0.0], [1.0, 2.0]], [[True, False], [True, True]])]
    assert [each.tolist() for each in found] == [[8.0, 8.0], [2.0, 2.0, 4.0, 4.0, 4.0]]


def test_a_function_that_gives_another_shape_is_refused_before_the_start() -> None:
    wrong = "planted_scorers:FLAT_BY_POSITION"
    check_scorer(ScoreConfig(scorer="planted_scorers:length", advantage=wrong))
    for name, match in (("NOT_BY_COLUMN", "takes_columns"), ("NOT_OF_ONE", "needs_spread")):
        given = {"scorer": "planted_scorers:length", "advantage": f"planted_scorers:{name}"}
        check_scorer(ScoreConfig.model_validate(given))
        with pytest.raises(ConfigError, match=match):
            check_scorer(ScoreConfig.model_validate(given | {"credit": "token"}))
    with pytest.raises(
        ConfigError, match=r"score\.advantage.*expected 2 x 2 advantages, got the shape \(4,\)"
    ):
        check_scorer(ScoreConfig(scorer="planted_scorers:length", advantage=wrong, credit="turn"))


def test_trajectories_whose_turns_are_not_known_are_refused() -> None:
    with pytest.raises(ScoreError, match="an older Rollmill stored it without its turns"):
        outcome_of((Survivor("a", 0, "e", 5, 1.0), Survivor("b", 1, "e", 5, 0.0)), credit="turn")
