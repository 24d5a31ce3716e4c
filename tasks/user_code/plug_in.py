"""A plug-in: an environment, a scorer, an advantage function or a loss, as a setting names it, with its arguments."""

import json
import re
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    JsonValue,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from rollmill.tasks.config import find_secret

FORM = "give a name, or {name: NAME, args: {ARGUMENT: VALUE}}"
# What cannot be stored, as JSON has it: half of a character, and NUL.
_UNSTORABLE = re.compile(r"[\ud800-\udfff]|(?<!\\)(\\\\)*\\u0000")
_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"title": "Name", "type": "string"},
        {
            "title": "Name and arguments",
            "type": "object",
            "properties": {
                "name": {"title": "Name", "type": "string", "minLength": 1},
                "args": {"title": "Arguments", "type": "object", "additionalProperties": True},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    ]
}


class PlugIn(BaseModel):
    """Code that a setting names, and its arguments.

    A setting gives the name alone, or {"name": ..., "args": {...}}; without arguments it is stored as the name alone.

    Attributes:
        name: a registered name, or an import path package.module:attribute; empty: none.
        args: JSON values by name, which `bind_arguments` compares with its signature.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    args: dict[str, JsonValue] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, given: object) -> object:
        if not isinstance(given, str | dict | PlugIn):
            raise PydanticCustomError("plug_in", "{form}", {"form": FORM})
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.args and not self.name:
            raise PydanticCustomError("plug_in", "its name is missing: {form}", {"form": FORM})
        try:
            text = json.dumps(self.args, allow_nan=False, ensure_ascii=False)
        except ValueError:
            raise PydanticCustomError("number", "a number of args is not finite") from None
        if _UNSTORABLE.search(text):
            raise PydanticCustomError("text", "a text may hold no NUL and no half of a character")
        # Settings are shown in logs and in Prefect, and stored in run.json.
        if remedy := find_secret(self.name) or find_secret(text):
            raise PydanticCustomError("secret", "{remedy}", {"remedy": remedy})
        return self

    @model_serializer
    def _write(self) -> str | dict[str, Any]:
        return {"name": self.name, "args": self.args} if self.args else self.name

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return _SCHEMA

    def __bool__(self) -> bool:
        """Return True if it names something."""
        return bool(self.name)

    def __str__(self) -> str:
        """Return the name, followed by the arguments as JSON. Example: 'openenv {"url": "http://host:8000"}'."""
        return f"{self.name} {json.dumps(self.args, ensure_ascii=False)}" if self.args else self.name
