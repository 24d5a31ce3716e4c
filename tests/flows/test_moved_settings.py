"""A setting that was renamed or removed is refused by its old name, with what to write instead."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollmill.flows.configuration.config import CONSTANTS, FOREIGN, GONE, RENAMED, RescoreConfig, RunConfig
from rollmill.flows.configuration.settings import load, settings, validate
from rollmill.tasks.errors import ConfigError


def nest(field: str, value: object) -> dict[str, Any]:
    for name in reversed(field.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(("field", "name"), RENAMED.items())
def test_a_renamed_setting_is_refused_with_its_new_name(field: str, name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(nest(field, 1))
    assert (raised.value.field, raised.value.value) == (field, 1)
    assert name in raised.value.remedy
    assert field not in settings()


def test_the_default_of_a_removed_setting_that_every_stored_run_has_is_accepted_and_no_other_value() -> None:
    stored = load("quickstart", ("retrain.scores=a@1",)).model_dump(mode="json")
    of_then = stored | {"retrain": stored["retrain"] | {"steps": [0, -1]}}
    assert validate(of_then) == validate(stored)
    for other in ([0, 7], [1, -1], None):
        with pytest.raises(ConfigError, match=r"retrain\.steps = .*use retrain\.where"):
            validate(stored | {"retrain": stored["retrain"] | {"steps": other}})


@pytest.mark.parametrize(("field", "value"), CONSTANTS.items())
def test_a_removed_setting_is_refused_with_the_constant_that_replaced_it(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(nest(field, 1))
    assert raised.value.field == field
    assert f"leave it out: it is a constant, {value}" in raised.value.remedy
    assert field not in settings()


@pytest.mark.parametrize(("field", "reason"), GONE.items())
def test_a_setting_without_a_successor_is_refused_with_the_reason(field: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(nest(field, 1))
    assert raised.value.field == field
    assert reason in raised.value.remedy
    assert field not in settings()


@pytest.mark.parametrize("name", [each for each in RENAMED.values() if " " not in each])
def test_a_new_name_is_a_setting(name: str) -> None:
    assert name in settings()


def test_names_of_other_libraries_are_those_of_the_glossary_and_lead_to_settings() -> None:
    _, table = (
        (Path(__file__).parents[2] / "docs/reference/glossary.md")
        .read_text()
        .split("## From TRL, verl and prime-rl")
    )
    for name, ours in FOREIGN.items():
        assert re.search(rf"\b{name}\b", table), name
        assert set(re.findall(r"[a-z_]+\.[a-z_.]+", ours)) <= set(settings()), name


def test_the_command_line_is_refused_with_the_new_name() -> None:
    with pytest.raises(ConfigError, match=r"train\.min_lr_share = 0\.1: use train\.min_lr_ratio instead"):
        load("quickstart", ("train.min_lr_share=0.1",))


@pytest.mark.parametrize("model", [RunConfig, RescoreConfig])
def test_a_flow_with_an_old_name_is_refused_with_the_new_one(model: type[RunConfig | RescoreConfig]) -> None:
    with pytest.raises(ValidationError, match=r"score\.needs_whole_group: use score\.min_group_size "):
        model.model_validate({"score": {"needs_whole_group": True}})
