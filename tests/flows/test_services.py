"""What a run asks of services that it attaches to."""

import pytest

from rollmill.flows.policies.services import check_settings
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.config import TrainConfig


def test_a_trainer_with_other_settings_of_training_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr = 0\.5: .*started with 0\.001"):
        check_settings(TrainConfig(lr=0.5), TrainConfig(lr=0.001).model_dump(mode="json"))


def test_settings_that_the_flow_uses_may_differ() -> None:
    theirs = TrainConfig(command_timeout_s=1234).model_dump(mode="json")
    check_settings(TrainConfig(url="http://127.0.0.1:1234", max_skipped_steps=3), theirs)
