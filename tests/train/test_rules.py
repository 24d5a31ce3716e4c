"""Settings of the objective that contradict each other."""

from typing import Any

import pytest

from tasks.errors import ConfigError
from tasks.train.config import TrainConfig
from tasks.train.rules import check_objective


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"importance": {"mode": "truncated"}}, "train.importance.mode = 'truncated': the loss ppo_clip"),
        ({"importance": {"mode": "masked", "floor": 3.0}}, "train.importance.floor = 3.0: must be below"),
        (
            {"normalization": "fixed_length"},
            "train.normalization_tokens = 0: normalization fixed_length needs",
        ),
        ({"lr_decay": "linear"}, "train.lr_decay_updates = 0: lr_decay linear needs"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_objective(TrainConfig.model_validate(settings))
    assert str(raised.value).startswith(told)


@pytest.mark.parametrize(
    "settings",
    [
        {"importance": {"mode": "masked", "floor": 0.5}},
        {"importance": {"mode": "truncated"}, "behaviour": "recomputed"},
        {"importance": {"mode": "truncated"}, "loss": "reinforce"},
        {"normalization": "fixed_length", "normalization_tokens": 24},
        {"lr_decay": "cosine", "lr_decay_updates": 40},
    ],
)
def test_settings_that_go_together_are_not(settings: dict[str, Any]) -> None:
    check_objective(TrainConfig.model_validate(settings))
