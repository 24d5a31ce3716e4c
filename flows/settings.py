"""A run's settings from presets and overrides, checked; every setting by its dotted name."""

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flows.config import RunConfig
from flows.presets import are_algorithms, preset_values
from flows.rules import check
from tasks.config import VARIABLE, StageConfig, nearest
from tasks.errors import ConfigError, masked
from tasks.store.fixed import value_of

HIDDEN = "***"
NAMES_VARIABLE = "give the name of the environment variable that holds the secret (capital letters, digits and _), not the secret"

Config = TypeVar("Config", bound=StageConfig)


def load(preset: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a preset (see preset_values), apply `key.subkey=value` overrides, and check it all.

    Example: load("quickstart+dapo", ("train.lr=1e-6", "steps=2"))

    Raises:
        ConfigError: the preset is missing, or a setting is unknown, out of range or contradicts another.
    """
    values = overridden(preset_values(preset), overrides)
    if are_algorithms(preset) and not {"model", "start_model"} & values.keys():
        remedy = (
            f"an algorithm alone has no model and no task; join it to a task's preset: quickstart+{preset}"
        )
        raise ConfigError("preset", preset, remedy)
    return validate(values)


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Settings with `key.subkey=value` overrides applied; ConfigError for one that is not written so."""
    values = copy.deepcopy(values)
    for override in overrides:
        _apply(values, override)
    return values


def validate(values: dict[str, Any]) -> RunConfig:
    """Check settings, those that belong to several stages included.

    Raises:
        ConfigError: names the first wrong field, its value and what is allowed.
    """
    config = parsed(RunConfig, values)
    check(config)
    return config


def parsed(model: type[Config], values: dict[str, Any]) -> Config:
    """Settings of a kind; ConfigError names the first wrong field, its value and what is allowed."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        value, remedy = _shown(first)
        raise ConfigError(field, value, f"{remedy}{_meant(model, field, first)}") from None


def _shown(error: ErrorDetails) -> tuple[object, str]:
    """The value that is refused, unless it may be a secret, and what is allowed in its place."""
    value = error["input"]
    if error["type"] == "secret":
        hidden = masked(str(value))
        return hidden if hidden != str(value) else HIDDEN, error["msg"]
    if error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == VARIABLE:
        return HIDDEN, NAMES_VARIABLE
    return value, "there is no such setting" if error["type"] == "extra_forbidden" else error["msg"]


def settings(model: type[StageConfig] = RunConfig, prefix: str = "") -> dict[str, bool]:
    """Every setting by its dotted name; True for those that may not change when a run is resumed."""
    found: dict[str, bool] = {}
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, StageConfig):
            found |= settings(section, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _is_fixed(field)
    return found


def fixed_settings() -> dict[str, object]:
    """Defaults, by dotted name, of the settings that may not change when a run is resumed."""
    defaults = RunConfig().model_dump(mode="json")
    return {name: value_of(defaults, name, None) for name, is_fixed in settings().items() if is_fixed}


def describe(model: type[StageConfig] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every setting as a line: name, default, whether it may not change when a run is resumed, meaning."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, StageConfig):
            yield from describe(section, f"{prefix}{name}.")
        else:
            mark = " (fixed)" if _is_fixed(field) else ""
            yield f"{prefix}{name} = {field.default!r}{mark}: {field.description}"


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError("--set", override, "write it as key=value, for example train.lr=1e-6")
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError("--set", override, f"{section} is a single setting, not a section")
    values[name] = _value(text)


def _value(text: str) -> Any:
    """YAML's reading of a value; 1e-6, which YAML takes for text, is a number."""
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError("--set", text, f"the value is not YAML: {error}") from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _meant(model: type[StageConfig], field: str, error: ErrorDetails) -> str:
    """The setting, or the choice of one, that is written nearly so; empty for other errors."""
    if error["type"] == "extra_forbidden":
        return nearest(field, settings(model))
    if error["type"] == "literal_error":
        return nearest(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    return ""


def _is_fixed(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return bool(isinstance(extra, dict) and extra["fixed"])
