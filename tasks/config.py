"""The base of every stage's configuration, and the one way to declare a setting."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


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
