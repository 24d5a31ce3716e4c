"""The setting rollout.environment_args: a JSON object with the arguments of an environment that others wrote."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rollmill.tasks.errors import ConfigError

FIELD = "rollout.environment_args"
Form = TypeVar("Form", bound=msgspec.Struct)


def parse_arguments(text: str) -> Mapping[str, Any]:
    """Parse the setting; an empty text gives an empty mapping.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(FIELD, text, f"give a JSON object ({error})") from error
    if not isinstance(arguments, dict):
        raise ConfigError(FIELD, text, 'give a JSON object, such as {"taskset": {"split": "train"}}')
    return arguments


def convert_arguments(text: str, form: type[Form]) -> Form:
    """Parse the setting to a struct.

    Raises:
        ConfigError: an argument is unknown, missing, or of another type.
    """
    try:
        return msgspec.convert(parse_arguments(text), form)
    except msgspec.ValidationError as error:
        raise ConfigError(FIELD, text, str(error)) from error
