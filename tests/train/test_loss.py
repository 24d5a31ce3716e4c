"""Losses by name, and of another package by import path."""

from pathlib import Path

import pytest
import torch

from rollmill.flows.checks.preflight import preflight
from rollmill.flows.configuration.settings import load
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.objective.losses.token_loss import Tokens
from rollmill.tasks.train.objective.objective import LOSSES, Objective, build_loss
from rollmill.tasks.train.setting_rules import HAS_RATIO


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_every_loss_declares_whether_it_has_a_ratio() -> None:
    assert LOSSES.keys() == HAS_RATIO.keys()


def test_a_loss_of_another_package_is_called_with_its_arguments_by_name() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(logprobs, logprobs, logprobs, torch.tensor([2.0, -3.0]), torch.tensor([0, 0]), 1)

    loss, has_ratio = build_loss(
        TrainConfig(loss={"name": "planted_losses:signed", "args": {"power": 2, "sides": ["a"]}})
    )

    assert loss(tokens).loss.tolist() == [4.0, -18.0]
    assert has_ratio


def test_a_loss_of_another_package_may_declare_that_it_has_no_ratio() -> None:
    truncated = {"mode": "truncated"}
    config = {"importance": truncated, "loss": "planted_losses:without_ratio"}

    assert not Objective(TrainConfig.model_validate(config)).uses_trainer_logprobs
    with pytest.raises(ConfigError, match="would count it twice"):
        Objective(TrainConfig.model_validate(config | {"loss": "planted_losses:signed"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "ppo"}, "train.loss = 'ppo': give a loss of Rollmill's (reinforce, ppo_clip"),
        ({"loss": "planted_losses:absent"}, "train.loss = 'planted_losses:absent'"),
        ({"loss": "planted_losses:__doc__"}, "it is a str"),
        ({"loss": "planted_losses:raises"}, "it raised KeyError: 'rows'"),
        ({"loss": "planted_losses:a_number"}, "it must give a TokenLoss"),
        ({"loss": "planted_losses:too_few"}, "it must give a TokenLoss of four tensors [N]"),
        ({"loss": "planted_losses:detached"}, "its loss has no gradient"),
        (
            {"loss": {"name": "planted_losses:signed", "args": {"powr": 2}}},
            "train.loss.args = {'powr': 2}: there is no powr; it takes power: float = 1.0, sides: tuple[str, ...] = ()",
        ),
        (
            {"loss": {"name": "planted_losses:signed", "args": {"power": "two"}}},
            "train.loss.args = {'power': 'two'}: power: Input should be a valid number",
        ),
        (
            {"loss": "planted_losses:slow"},
            "train.loss.args = {}: seconds is missing; it takes seconds: float",
        ),
        ({"loss": {"name": "ppo_clip", "args": {"power": 2}}}, "ppo_clip takes none"),
    ],
)
def test_a_wrong_loss_is_a_wrong_setting_that_says_what_to_do(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        Objective(TrainConfig.model_validate(settings))
    assert message in str(raised.value)


@pytest.mark.slow
def test_a_wrong_loss_of_another_package_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    overrides = ("train.loss=planted_losses:signed", "train.loss.args.powr=2")
    with pytest.raises(ConfigError, match=r"train\.loss\.args.*power"):
        preflight(load("quickstart", overrides))


def test_rows_without_an_advantage_are_computed_for_a_loss_of_another_package() -> None:
    assert not Objective(TrainConfig(loss="planted_losses:signed")).skips_without_advantage
