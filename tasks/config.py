"""The base of every stage's configuration, and the one way to declare a setting, or a thing it names."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
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


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that was meant, as the end of a message; empty when none is near. Example: "; did you mean mean_std?"."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def named(field: str, name: str, registered: Mapping[str, str]) -> Any:
    """What a setting names: a registered name, or an import path `package.module:attribute`.

    Raises:
        ConfigError: nothing can be imported under that name.
    """
    module, _, attribute = registered.get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _unmakeable(field, name, registered, error) from error


def made_by_name(field: str, name: str, registered: Mapping[str, str]) -> Any:
    """Make what a setting names, without arguments.

    Raises:
        ConfigError: nothing can be imported under that name, or made without arguments.
    """
    factory = named(field, name, registered)
    try:
        return factory()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _unmakeable(field, name, registered, error) from error


def _unmakeable(field: str, name: str, registered: Mapping[str, str], error: Exception) -> ConfigError:
    names = ", ".join(sorted(registered))
    remedy = f"give a registered name ({names}) or an import path package.module:Class ({error}){nearest(name, registered)}"
    return ConfigError(field, name, remedy)
