"""What sinks such as TensorBoard get of a stored run."""

import pytest

from rollmill.flows.run.run_sinks import evaluation_points
from rollmill.tasks.observe.sinks.metric_sinks import EVALUATION
from rollmill.tasks.store.folders import RunFolder


def test_an_evaluation_has_its_number_of_problems_and_intervals_as_far_as_they_are_known(
    small_run: RunFolder,
) -> None:
    first, last = evaluation_points(small_run)
    accuracy = {"greedy_accuracy": 1.0, "greedy_accuracy_low": 0.342, "greedy_accuracy_high": 1.0}
    rewards = {"reward": 1.0, "reward_low": 0.342, "reward_high": 1.0}
    assert (first.marker, first.step, last.step) == (EVALUATION, 0, 3)
    half = {"pass_at_k": 0.5, "pass_at_k_low": 0.095, "pass_at_k_high": 0.905}
    whole = {"pass_at_k": 1.0, "pass_at_k_low": 0.342, "pass_at_k_high": 1.0}
    assert first.values == named({"n": 2, "samples": 1, "reward": 0.55} | accuracy | half)
    assert last.values == named({"n": 2, "samples": 1} | rewards | accuracy | whole)


def named(values: dict[str, float]) -> dict[str, object]:
    return {f"evaluation/{name}": pytest.approx(value, abs=1e-3) for name, value in values.items()}
