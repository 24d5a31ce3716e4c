"""What a run asks of services that it attaches to."""

import pytest

from rollmill.flows.policies.services import check_settings
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.config import KLConfig, LoraConfig, TrainConfig


def test_a_trainer_with_other_settings_of_training_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match=r"train\.lora\.rank = 4: .*started with 0"):
        check_settings(TrainConfig(lora=LoraConfig(rank=4)), TrainConfig().model_dump(mode="json"))


def test_a_trainer_may_be_started_with_other_settings_than_those_that_each_step_is_sent_with() -> None:
    ours = TrainConfig(lr=0.5, loss="reinforce", betas=(0.8, 0.9), kl=KLConfig(coef=0.1), max_grad_norm=0.0)
    check_settings(ours, TrainConfig().model_dump(mode="json"))


def test_settings_that_the_flow_uses_may_differ() -> None:
    theirs = TrainConfig(command_timeout_s=1234).model_dump(mode="json")
    check_settings(TrainConfig(url="http://127.0.0.1:1234", max_skipped_steps=3), theirs)
