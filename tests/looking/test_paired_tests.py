"""The gate's test has the error rates that it states."""

import numpy as np
import polars as pl
import pytest
from stored_policies import Rewards, draw_rewards

from rollmill.tasks.look.comparisons.paired_evaluations import compare_pairs, explain_checks, make_checks

MARGIN = 0.05


def answers(rewards: Rewards) -> pl.DataFrame:
    """What `read_answers` makes of an evaluation."""
    n = len(rewards.greedy)
    keys = {
        "env": ["addition"] * n,
        "example_id": list(map(str, range(n))),
        "example": [""] * n,
        "repeat": [0] * n,
    }
    kinds = ((True, rewards.greedy), (False, rewards.sampled.mean(axis=1)))
    return pl.concat(
        [pl.DataFrame(keys | {"greedy": [greedy] * n, "reward": each}) for greedy, each in kinds]
    )


def passes(candidate: Rewards, production: Rewards, error_rate: float = 0.05) -> tuple[bool, float]:
    """True if the candidate passes, and the probability that the gate states for an equal one."""
    checks = make_checks(answers(candidate), answers(production), MARGIN, error_rate)
    assert all(each.passed for each in checks) == (not explain_checks(checks, MARGIN))
    rate = 1.0
    for each in checks:
        assert each.pass_rate is not None
        rate *= each.pass_rate
    return all(each.passed for each in checks), rate


def test_twenty_planted_regressions_are_blocked() -> None:
    """Twice the margin: each passes with a probability far below the error rate."""
    production = draw_rewards(1000, 500)
    assert [passes(draw_rewards(seed, 500, drop=2 * MARGIN), production)[0] for seed in range(20)] == [
        False
    ] * 20


def test_twenty_equal_policies_pass_at_the_stated_rate() -> None:
    found = [passes(draw_rewards(seed, 500), draw_rewards(seed + 100, 500)) for seed in range(20)]
    stated = sum(rate for _, rate in found)
    assert 19.0 < stated < 20.0
    # Of 20 that pass with a probability of 0.97, fewer than 17 pass once in 400 times.
    assert sum(passed for passed, _ in found) >= 17


@pytest.mark.parametrize("n", [40, 200, 1000])
@pytest.mark.parametrize(("right", "better", "worse"), [(0.5, 0.1, 0.15), (0.9, 0.0, 0.05), (0.3, 0.3, 0.35)])
def test_a_policy_that_is_worse_by_the_margin_passes_as_often_as_stated(
    n: int, right: float, better: float, worse: float
) -> None:
    """Answers to a prompt: right by both, by the candidate alone, by production alone. 3,000 evaluations: 0.02 is five deviations."""
    rng = np.random.default_rng([n, int(100 * right)])
    drawn = rng.uniform(size=(3000, n))
    differences = np.where(drawn < better, 1.0, np.where(drawn < better + worse, -1.0, 0.0))
    assert right + better + worse <= 1.0
    found = [compare_pairs(each, 1.0, MARGIN, 0.05) for each in differences]
    assert np.mean([each.passed for each in found]) <= 0.05 + 0.02


@pytest.mark.parametrize("n", [200, 1000])
def test_an_equal_policy_passes_as_often_as_stated(n: int) -> None:
    rng = np.random.default_rng(n)
    drawn = rng.uniform(size=(3000, n))
    differences = np.where(drawn < 0.1, 1.0, np.where(drawn < 0.2, -1.0, 0.0))
    found = [compare_pairs(each, 1.0, MARGIN, 0.05) for each in differences]
    stated = np.mean([each.pass_rate for each in found])
    assert np.mean([each.passed for each in found]) == pytest.approx(stated, abs=0.03)


def test_few_prompts_without_a_difference_are_no_certainty() -> None:
    assert not compare_pairs(np.zeros(40), 1.0, MARGIN, 0.05).passed
    assert compare_pairs(np.zeros(400), 1.0, MARGIN, 0.05).passed


def test_the_bound_is_that_of_the_formula() -> None:
    """Worked by hand: of 98 pairs 8 better and 4 worse: m = 4 / 100, v = 13 / 100 - m^2."""
    differences = np.array([1.0] * 8 + [-1.0] * 4 + [0.0] * 86)
    expected = 0.04 - 1.6448536269514722 * ((0.13 - 0.0016) / 100) ** 0.5
    assert compare_pairs(differences, 1.0, MARGIN, 0.05).low == pytest.approx(expected, abs=1e-12)
