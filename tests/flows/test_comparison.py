import math

import pytest

from rollmill.flows.offline.replay_comparison import (
    StepComparison,
    choose_versions,
    comparison_table,
    first_difference,
)
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.folders import RunFolder


def test_a_replay_goes_from_the_last_checkpoint_but_one_to_the_last() -> None:
    assert choose_versions([10, 20, 30], None, None) == (20, 30)
    assert choose_versions([10, 20, 30], 0, None) == (0, 30)
    assert choose_versions([10, 20, 30], None, 10) == (0, 10)


@pytest.mark.parametrize(
    ("checkpoints", "first", "last", "field"),
    [
        ([10], None, 20, "--to"),
        ([10, 20], 15, None, "--from"),
        ([10, 20], 20, 10, "--from"),
        ([], None, 10, "--to"),
        ([], None, None, "checkpoints"),
        ([], 0, None, "checkpoints"),
    ],
)
def test_versions_without_a_checkpoint_are_refused(
    checkpoints: list[int], first: int | None, last: int | None, field: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_versions(checkpoints, first, last)

    assert raised.value.field == field


def test_the_first_difference_is_named() -> None:
    same = StepComparison(3, {"train/loss": 0.5}, {"train/loss": 0.5, "train/gradient_norm": 1.0})
    other = StepComparison(4, {"train/loss": 0.5}, {"train/loss": 0.25})
    tensors = {"weights/a": "00", "weights/b": "11"}

    assert first_difference([same], tensors, dict(tensors)) == ""
    assert first_difference([same, other], tensors, {}) == "step 4: train/loss was 0.5, is 0.25"
    assert first_difference([same], tensors, {"weights/a": "00", "weights/b": "22"}).startswith(
        "weights/b differs"
    )


def test_a_step_without_stored_metrics_is_neither_the_same_nor_another_one() -> None:
    loss = {"train/loss": 0.5}
    steps = [
        StepComparison(3, loss, loss),
        StepComparison(4, loss, {"train/loss": 0.25}),
        StepComparison(5, {}, loss),
    ]
    assert list(comparison_table(RunFolder("runs/a"), steps).columns[-1].cells) == ["yes", "no", ""]


def test_nan_is_the_same_as_nan_and_as_nothing_else() -> None:
    nan = {"train/loss": math.nan}

    assert StepComparison(3, nan, {"train/loss": math.nan}).difference == ""
    assert StepComparison(3, nan, {"train/loss": 0.5}).difference == "step 3: train/loss was nan, is 0.5"
    assert StepComparison(3, nan, {}).difference == "step 3: train/loss was nan, is None"
