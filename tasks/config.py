"""The base of every stage's configuration, and the one way to declare a setting, or a thing it names."""

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tasks.errors import ConfigError


class StageConfig(BaseModel):
    """Frozen settings; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def setting(default: Any, description: str, *, fixed: bool = False, **limits: Any) -> Any:
    """Declare one setting.

    Args:
        default: the value when none is given; `...` when one must be.
        description: what the UI's form shows: meaning, unit, range.
        fixed: True for what may not change when a run is resumed.
        limits: pydantic's `ge`, `gt`, `le`, `lt`, `min_length`, `pattern`, ...
    """
    return Field(default, description=description, json_schema_extra={"fixed": fixed}, **limits)


def made_by_name(field: str, name: str, registered: Mapping[str, str]) -> Any:
    """Make what a setting names: a registered name, or an import path `package.module:Class`.

    Raises:
        ConfigError: nothing can be imported under that name, or made without arguments.
    """
    module, _, attribute = registered.get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        names = ", ".join(sorted(registered))
        remedy = f"give a registered name ({names}) or an import path package.module:Class ({error})"
        raise ConfigError(field, name, remedy) from error
