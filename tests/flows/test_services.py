"""What a run asks of services that it attaches to, and gives to those that it launches."""

import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.flows.commands.foreground import vllm_here
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.policies.services import ServerService, check_settings, start_services
from rollmill.tasks.errors import ConfigError, ServiceStartError
from rollmill.tasks.train.config import KLConfig, LoraConfig, TrainConfig

TEMPLATE_ARGUMENTS = '--chat-template my.jinja --default-chat-template-kwargs {"a": 1}'


def test_a_trainer_with_other_settings_of_training_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match=r"train\.lora\.rank = 4: .*started with 0"):
        check_settings(TrainConfig(lora=LoraConfig(rank=4)), TrainConfig().model_dump(mode="json"))


def test_a_trainer_may_be_started_with_other_settings_than_those_that_each_step_is_sent_with() -> None:
    ours = TrainConfig(lr=0.5, loss="reinforce", betas=(0.8, 0.9), kl=KLConfig(coef=0.1), max_grad_norm=0.0)
    check_settings(ours, TrainConfig().model_dump(mode="json"))


def test_settings_that_the_flow_uses_may_differ() -> None:
    theirs = TrainConfig(command_timeout_s=1234).model_dump(mode="json")
    check_settings(TrainConfig(url="http://127.0.0.1:1234", max_skipped_steps=3), theirs)


@pytest.fixture
def recording_config(tmp_path: Path) -> Iterator[RunConfig]:
    """Settings with a chat template, and a Python of vLLM that writes down its arguments and ends."""
    (tmp_path / "config.json").write_text("{}")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\necho \'{{"vllm": "0.32.0"}}\'\n')
    python.chmod(stat.S_IRWXU)
    rollout = {"chat_template": "my.jinja", "chat_template_kwargs": {"a": 1}}
    settings = {"model": str(tmp_path), "rollout": rollout, "serve": {"python": str(python)}}
    # A service in the foreground takes SIGTERM for itself.
    handler = signal.getsignal(signal.SIGTERM)
    yield RunConfig.model_validate(settings | {"start_timeout_s": 20})
    signal.signal(signal.SIGTERM, handler)


async def test_a_launched_server_gets_the_template_of_the_run(
    recording_config: RunConfig, tmp_path: Path
) -> None:
    service = ServerService(recording_config, tmp_path, tmp_path, 0)
    with pytest.raises(ExceptionGroup) as raised:
        async with start_services((service,)):
            pass
    assert raised.group_contains(ServiceStartError)
    assert TEMPLATE_ARGUMENTS in (tmp_path / "arguments").read_text()


def test_a_server_in_the_foreground_gets_the_template_of_the_run(
    recording_config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        vllm_here(recording_config, "127.0.0.1", 0)
    assert TEMPLATE_ARGUMENTS in (tmp_path / "arguments").read_text()
