"""How far apart is too far."""

import math

import numpy as np
import pytest

from rollmill.tasks.sync.weight_parity import FLOAT32_THRESHOLD, choose_threshold, largest_difference


def test_the_difference_is_that_of_the_worst_token_of_all_sequences() -> None:
    expected = [[-1.0, -2.0], [-3.0]]
    found = [np.array([-1.0, -2.25], np.float32), np.array([-3.5], np.float32)]
    assert largest_difference(expected, found) == 0.5


def test_sequences_of_one_token_have_nothing_to_compare() -> None:
    assert largest_difference([[]], [np.array([], np.float32)]) == 0.0


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_a_number_is_never_the_smaller_one(order: int) -> None:
    expected, found = [[-1.0], [math.nan]][::order], [np.array([-1.0]), np.array([-1.0])]
    assert math.isnan(largest_difference(expected, found))


def test_a_missing_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        largest_difference([[-1.0], [-1.0]], [np.array([-1.0])])


def test_float32_has_a_fixed_threshold() -> None:
    assert choose_threshold("float32", 0.0, [0.5, 0.5]) == FLOAT32_THRESHOLD == 1e-4


def test_other_types_are_allowed_five_times_the_median_at_version_0() -> None:
    assert choose_threshold("bfloat16", 0.0, [0.01, 0.5, 0.02]) == pytest.approx(0.1)


def test_a_configured_threshold_holds() -> None:
    assert choose_threshold("bfloat16", 0.3, [0.01]) == 0.3
