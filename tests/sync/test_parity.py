"""What log-probabilities of known tokens say about a server's weights."""

import math

import numpy as np
import pytest

from rollmill.tasks.sync.weight_parity import (
    FLOAT32_LIMITS,
    START_LIMITS,
    WINDOW,
    LogprobDifferences,
    Movement,
    ParityWindow,
)

USUAL = LogprobDifferences(0.001, 0.01, 0.2)


def test_differences_are_over_the_tokens_of_all_sequences() -> None:
    expected = [[-1.0, -2.0], [-3.0]]
    found = [np.array([-1.0, -2.25], np.float32), np.array([-3.5], np.float32)]
    measured = LogprobDifferences.measure(expected, found)
    assert (measured.mean, measured.largest) == (0.25, 0.5)
    assert measured.high == pytest.approx(0.495)


@pytest.mark.parametrize("expected", [[[]], [[math.nan]]])
def test_differences_of_nothing_or_of_no_number_are_no_number(expected: list[list[float]]) -> None:
    measured = LogprobDifferences.measure(expected, [np.full(len(expected[0]), -1.0)])
    assert math.isnan(measured.mean)
    assert math.isnan(measured.high)
    assert math.isnan(measured.largest)


def test_a_missing_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        LogprobDifferences.measure([[-1.0, -1.0, -2.0]], [np.array([-1.0, -1.0])])


def test_exact_kernels_have_fixed_limits_whatever_came_before() -> None:
    window = ParityWindow([USUAL])
    assert "on average; the limit is 2e-05" in window.find_excess(USUAL, is_exact=True)
    assert not window.find_excess(FLOAT32_LIMITS, is_exact=True)


def test_kernels_that_round_are_compared_with_the_median_of_earlier_syncs() -> None:
    window = ParityWindow([USUAL, LogprobDifferences(0.1, 1.0, 3.0), USUAL])
    assert window.limits.mean == pytest.approx(0.005)
    assert window.limits.high == pytest.approx(0.1)
    assert not window.find_excess(LogprobDifferences(0.0049, 0.099, 100.0), is_exact=False), (
        "one token alone raises no alarm"
    )
    assert "on average" in window.find_excess(LogprobDifferences(0.0051, 0.01, 0.2), is_exact=False)
    assert "at the 99% quantile" in window.find_excess(LogprobDifferences(0.001, 0.101, 0.2), is_exact=False)
    assert window.find_excess(LogprobDifferences(), is_exact=False)


def test_the_window_forgets_old_syncs_and_skips_those_without_a_comparison() -> None:
    window = ParityWindow()
    assert window.limits is START_LIMITS
    for _ in range(WINDOW):
        window.accept(LogprobDifferences(0.05, 0.5, 1.0))
    for _ in range(WINDOW // 2 + 1):
        window.accept(USUAL)
        window.accept(LogprobDifferences())
    assert window.limits.mean == pytest.approx(0.005)


def test_a_server_that_computes_another_function_is_reported_at_every_sync() -> None:
    window = ParityWindow([USUAL])
    for _ in range(3 * WINDOW):
        wrong = LogprobDifferences(3.0, 9.0, 20.0)
        assert window.find_excess(wrong, is_exact=False)
        window.accept(wrong)
    assert (window.limits.mean, window.limits.high) == (START_LIMITS.mean, START_LIMITS.high)


def make_logprobs(seed: int, scale: float, n: int = 200) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, scale, n)


OLD = make_logprobs(0, 1.0)
# What an update changes, and the rounding of four scorings.
CHANGE, *ROUNDING = make_logprobs(1, 0.02), *(make_logprobs(seed, 0.002) for seed in range(2, 6))


def measure(server_after: np.ndarray, change: np.ndarray = CHANGE) -> Movement:
    trainer = [OLD + ROUNDING[0]], [OLD + change + ROUNDING[1]]
    found = Movement.measure(trainer, ([OLD + ROUNDING[2]], [server_after]))
    assert found is not None
    return found


def test_a_server_with_the_new_weights_moves_as_the_trainer_does() -> None:
    movement = measure(OLD + CHANGE + ROUNDING[3])
    assert movement.slope == pytest.approx(movement.expected, abs=3 * movement.error)
    assert movement.expected == pytest.approx(0.98, abs=0.02)
    assert not movement.is_stale


@pytest.mark.parametrize("seed", range(20))
def test_a_server_with_the_old_weights_does_not_move(seed: int) -> None:
    assert measure(OLD + make_logprobs(10 + seed, 0.002)).is_stale


def test_an_update_below_rounding_decides_nothing() -> None:
    movement = measure(OLD + make_logprobs(6, 0.002), change=0.01 * CHANGE)
    assert movement.expected < 0.2
    assert not movement.is_stale


def test_a_server_that_repeats_every_number_has_the_old_weights_however_small_the_update() -> None:
    movement = measure(OLD + ROUNDING[2], change=0.001 * CHANGE)
    assert (movement.slope, movement.error) == (0.0, 0.0)
    assert movement.is_stale


def test_few_tokens_that_the_trainer_scores_differently_decide_nothing() -> None:
    before, after = np.zeros(200), np.zeros(200)
    after[:31] = 0.5
    movement = Movement.measure(([before], [after]), ([before], [before]))
    assert movement is not None
    assert (movement.n_moved, movement.is_stale) == (31, False)


@pytest.mark.parametrize(("trainer_after", "server_after"), [(0.0, 1.0), (math.nan, 1.0), (1.0, math.nan)])
def test_without_movement_or_with_no_numbers_nothing_is_measured(
    trainer_after: float, server_after: float
) -> None:
    before = np.zeros(50)
    assert Movement.measure(([before], [before + trainer_after]), ([before], [before + server_after])) is None
