"""The text of a setting in the run form of Prefect's UI."""

from typing import Any

import pytest

from rollmill.flows.configuration.config import RescoreConfig, RunConfig
from rollmill.tasks.config import StageConfig, make_title, setting


class Example(StageConfig):
    share_s: float = setting(0.5, "Share.", gt=0.0, le=1.0, fixed=True)
    names: tuple[str, ...] = setting((), "Names.")
    is_on: bool = setting(True, "Whether.")
    path: str = setting(..., "Where.")


def properties(model: type[StageConfig] = Example) -> dict[str, Any]:
    found: dict[str, Any] = model.model_json_schema()["properties"]
    return found


def test_range_default_and_permanence_are_in_the_description_of_the_form_alone() -> None:
    text = "Share. Above 0, at most 1. Default: 0.5. Cannot change when a run is resumed."
    assert properties()["share_s"]["description"] == text
    assert Example.model_fields["share_s"].description == "Share."


def test_a_default_that_says_nothing_is_left_out() -> None:
    assert properties()["names"]["description"] == "Names."
    assert properties()["path"]["description"] == "Where."
    assert properties()["is_on"]["description"] == "Whether. Default: on."


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("request_timeout_s", "Request timeout (seconds)"),
        ("lr", "Learning rate"),
        ("api_key_env", "API key (environment variable)"),
        ("s", "S"),
        ("max_in_flight", "Max in flight"),
        ("max_grad_norm", "Max grad norm"),
        ("min_lr_ratio", "Min learning-rate ratio"),
        ("kl", "KL"),
        ("zero_stage", "ZeRO stage"),
        ("mlflow_uri", "MLflow URI"),
    ],
)
def test_titles_are_words_with_units(name: str, title: str) -> None:
    assert make_title(name) == title


@pytest.mark.parametrize("model", [RunConfig, RescoreConfig])
def test_the_form_needs_no_json_box(model: type[StageConfig]) -> None:
    """Unions and dictionaries are boxes for JSON in the form, but for arguments of a plug-in, which has a tab with its name alone."""
    schema = model.model_json_schema()
    sections = [schema, *(each for name, each in schema["$defs"].items() if name != "PlugIn")]
    fields = [(each["title"], name, field) for each in sections for name, field in each["properties"].items()]
    boxes = [
        (title, name) for title, name, field in fields if "anyOf" in field or field.get("type") == "object"
    ]
    assert boxes == []
    assert [(title, name) for title, name, field in fields if not field.get("description")] == []
