"""When a step's ratios before its first update are worth a warning."""

import pytest

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.policies.server_parity import ratio_warning
from rollmill.tasks.observe.metrics import Metric
from tests.stubs.toy_settings import validate_toy


def config(**sections: dict[str, object]) -> RunConfig:
    return validate_toy(sections)


def find_warning(settings: RunConfig, deviation: float) -> str:
    others = [
        Metric("train/first_ratio_deviation", "addition", "mean", 9.0),
        Metric("train/ratio", "all", "mean", 9.0),
    ]
    return ratio_warning(
        settings, 3, [*others, Metric("train/first_ratio_deviation", "all", "mean", deviation)]
    )


def test_ratios_beyond_rounding_are_reported_with_step_value_limit_and_remedy() -> None:
    message = find_warning(config(), 0.02)
    assert message.startswith("step 3: ")
    assert "0.02 on average" in message
    assert "should be at most 0.001" in message
    assert "rollmill verify-sync" in message


def test_rounding_is_no_reason_to_warn() -> None:
    assert find_warning(config(), 1e-4) == ""


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"max_staleness": 1}},
        {"rollout": {"replay": {"share": 0.25}}},
        {"retrain": {"sources": ["runs/others"]}},
        {"train": {"old_logprobs": "trainer"}},
    ],
)
def test_ratios_that_need_not_be_1_are_not_reported(sections: dict[str, dict[str, object]]) -> None:
    assert find_warning(config(**sections), 0.02) == ""


@pytest.mark.parametrize(("deviation", "is_reported"), [(0.02, False), (0.859, True)])
def test_in_half_precision_only_another_function_is_reported(deviation: float, is_reported: bool) -> None:
    settings = config(train={"dtype": "bfloat16"}, serve={"dtype": "bfloat16"})
    assert ("should be at most 0.1" in find_warning(settings, deviation)) is is_reported


def test_a_step_that_trained_on_nothing_has_no_ratio_to_warn_of() -> None:
    assert ratio_warning(config(), 3, []) == ""


@pytest.mark.parametrize(("staleness", "is_reported"), [(0, True), (1, False)])
def test_with_the_trainers_old_logprobs_the_difference_from_the_servers_is_reported(
    staleness: int, is_reported: bool
) -> None:
    settings = config(train={"old_logprobs": "trainer"}, rollout={"max_staleness": staleness})
    mismatch = [Metric("train/mismatch_nats", "all", stat, 0.3) for stat in ("std", "mean", "max")]
    warning = ratio_warning(settings, 3, mismatch)
    assert ("the difference of log-probabilities is 0.3 on average" in warning) is is_reported
