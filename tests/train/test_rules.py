"""Settings of the objective that contradict each other."""

from typing import Any

import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.setting_rules import check_objective, check_offload


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance": {"mode": "truncated"}}, "train.importance.mode = 'truncated': the loss ppo_clip"),
        (
            {"importance": {"mode": "masked", "bounds": (3.0, 2.0)}},
            "train.importance.bounds = (3.0, 2.0): give the smallest",
        ),
        (
            {"normalization": "fixed_length"},
            "train.normalization_tokens = 0: normalization fixed_length needs",
        ),
        (
            {"importance": {"mode": "masked", "bounds": (1.5, 2.0)}},
            "train.importance.bounds = (1.5, 2.0): ",
        ),
        (
            {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "normalization": "fixed_length"},
            "train.normalization = 'fixed_length': the loss gspo has one ratio for an answer",
        ),
        ({"lr_decay": "linear"}, "train.lr_decay_updates = 0: lr_decay linear needs"),
        ({"lr_decay_updates": 40}, "train.lr_decay_updates = 40: the rate falls with train.lr_decay"),
        ({"min_lr_ratio": 0.1}, "train.min_lr_ratio = 0.1: the rate falls with train.lr_decay"),
        (
            {"importance": {"bounds": (0.5, 2.0)}},
            "train.importance.bounds = (0.5, 2.0): a smallest ratio above 0 is for train.importance.mode masked",
        ),
        (
            {"loss": "gspo"},
            "train.loss = 'gspo': train.clip_low and train.clip_high are the defaults 0.2 and 0.28",
        ),
        ({"loss": "cispo"}, "train.loss = 'cispo': train.clip_low and train.clip_high are the defaults"),
        (
            {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
            "train.normalization = 'token': the loss gspo has one ratio for an answer",
        ),
        ({"clip_dual": 1.0}, "train.clip_dual = 1.0: must be above 1"),
        (
            {"loss": "cispo", "clip_low": 1.0, "clip_dual": 3.0},
            "train.clip_dual = 3.0: is for the loss ppo_clip, and train.loss is cispo",
        ),
        ({"kl": {"model": "models/a"}}, "train.kl.model = 'models/a': is the model of a frozen reference"),
        ({"kl": {"urls": ["http://a:1"]}}, "train.kl.urls = ['http://a:1']: are servers of a reference"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_objective(TrainConfig.model_validate(settings))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "settings",
    [
        {"importance": {"mode": "masked", "bounds": (0.5, 2.0)}},
        {"importance": {"mode": "truncated"}, "old_logprobs": "trainer"},
        {"importance": {"mode": "truncated"}, "loss": "reinforce"},
        {"normalization": "fixed_length", "normalization_tokens": 24},
        {"clip_dual": 3.0},
        {"loss": "cispo", "clip_low": 1.0},
        {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "normalization": "sequence"},
        {"lr_decay": "cosine", "lr_decay_updates": 40, "min_lr_ratio": 0.1},
    ],
)
def test_settings_that_go_together_are_not(settings: dict[str, Any]) -> None:
    check_objective(TrainConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("offload", "zero_stage", "device", "message"),
    [
        ("optimizer", 0, "cuda", "the optimizer's state, train.zero_stage must be at least 1; it is 0"),
        (
            "optimizer_and_weights",
            2,
            "cuda",
            "state and the weights, train.zero_stage must be at least 3; it is 2",
        ),
        ("optimizer", 1, "cpu", "this trainer computes on the CPU"),
        ("optimizer_and_weights", 3, "cpu", "this trainer computes on the CPU"),
    ],
)
def test_an_impossible_offload_is_refused(offload: Any, zero_stage: Any, device: str, message: str) -> None:
    config = TrainConfig(offload=offload, zero_stage=zero_stage)
    with pytest.raises(ConfigError, match=rf"train\.offload = '{offload}': .*{message}"):
        check_offload(config, device)


def test_a_possible_offload_is_accepted() -> None:
    check_offload(TrainConfig(), "cpu")
    check_offload(TrainConfig(offload="optimizer", zero_stage=1), "cuda")
    check_offload(TrainConfig(offload="optimizer_and_weights", zero_stage=3))
