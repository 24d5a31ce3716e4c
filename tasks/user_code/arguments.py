"""The arguments that settings give a plug-in, compared with its signature.

pydantic, whose import is slow for a worker process, is imported for given arguments alone.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, formatannotation, signature
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from rollmill.tasks.errors import ConfigError, user_error_text

if TYPE_CHECKING:
    from pydantic import BaseModel

_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def bind_arguments(
    field: str, function: Callable[..., Any], given: Mapping[str, Any], n_positional: int = 0
) -> dict[str, Any]:
    """Return the arguments with which a plug-in is called by name, converted to the types of its annotations.

    Example: of `def short(candidate, *, limit: int)` {"limit": "5"} gives {"limit": 5}.

    Args:
        field: the setting that names the plug-in.
        function: function or class.
        given: JSON values by name.
        n_positional: number of arguments that it is called with besides, by position.

    Raises:
        ConfigError: names FIELD.args: an argument is unknown or missing, or has another type.
    """
    parameters = _list_parameters(function, n_positional)
    if parameters is None:
        # Some functions written in C do not say what they take.
        return dict(given)
    if not given and not any(
        each.kind in _BY_NAME and each.default is Parameter.empty for each in parameters
    ):
        return {}
    from pydantic import ValidationError

    try:
        found = _make_form(function, n_positional).model_validate(dict(given))
    except ValidationError as error:
        # One that is not there is often the misspelt name of one that is missing.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        place = ".".join(str(part) for part in first["loc"])
        problem = {"missing": f"{place} is missing", "extra_forbidden": f"there is no {place}"}
        what = problem.get(first["type"], f"{place}: {first['msg']}")
        raise ConfigError(f"{field}.args", dict(given), f"{what}; it takes {_describe(parameters)}") from None
    names = {name: each.alias or name for name, each in type(found).model_fields.items()}
    own = {names[each]: getattr(found, each) for each in found.model_fields_set if each in names}
    for name, value in own.items():
        if _is_number_of_bool(given[name], value):
            what = f"{name}: Input should be a number, not true or false"
            raise ConfigError(f"{field}.args", dict(given), f"{what}; it takes {_describe(parameters)}")
    return own | (found.model_extra or {})


@contextmanager
def name_arguments(field: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Make a ValueError of a plug-in that is created with arguments a ConfigError that names FIELD.args."""
    try:
        yield
    except ValueError as error:
        if not given:
            raise
        why = f"{type(error).__name__}: {user_error_text(error)}"
        raise ConfigError(f"{field}.args", dict(given), why) from error


def list_altered_arguments(
    function: Callable[..., Any], bound: Mapping[str, Any], n_positional: int = 0
) -> dict[str, Any]:
    """Return those of the arguments from `bind_arguments` that differ from the defaults of a plug-in."""
    parameters = _list_parameters(function, n_positional) or []
    defaults = {each.name: each.default for each in parameters}
    return {name: value for name, value in bound.items() if not _equals(defaults.get(name), value)}


def _equals(default: object, value: object) -> bool:
    if default is None or value is None or isinstance(default, bool) != isinstance(value, bool):
        return default is value
    try:
        return bool(default == value)
    except Exception:  # noqa: BLE001 - foreign code: whatever its comparison raises
        return False


def _is_number_of_bool(given: object, found: object) -> bool:
    """Return True if pydantic made a number of true or false, in a list or mapping too."""
    if isinstance(given, bool):
        return isinstance(found, int | float) and not isinstance(found, bool)
    if isinstance(given, list) and isinstance(found, list | tuple):
        return any(map(_is_number_of_bool, given, found))
    if isinstance(given, dict) and isinstance(found, dict):
        return any(map(_is_number_of_bool, given.values(), found.values()))
    return False


def make_argument_schema(function: Callable[..., Any], n_positional: int = 0) -> dict[str, Any]:
    """Return the JSON schema of a plug-in's arguments, as a form shows them: defaults as text, since Prefect would fill them in."""
    schema = _make_form(function, n_positional).model_json_schema()
    for field in schema["properties"].values():
        if default := field.pop("default", None):
            field["description"] = f"{field.get('description', '')} Default: {default}.".strip()
    return schema


def describe_arguments(
    field: str, function: Callable[..., Any], texts: Mapping[str, str], n_positional: int = 0
) -> list[str]:
    """Return a line for each argument of a plug-in: name, default as JSON, type, and its text or that of `texts`.

    Example: "score.scorer.args.limit = 100 (int): Tokens from which on it is long."
    """
    from pydantic_core import to_jsonable_python

    lines, form = [], _make_form(function, n_positional)
    for each in form.model_fields.values():
        name, kind = f"{field}.args.{each.alias}", formatannotation(each.annotation)
        if each.is_required():
            shown = f"{name} ({kind}, required)"
        else:
            default = json.dumps(to_jsonable_python(each.default, fallback=repr), ensure_ascii=False)
            shown = f"{name} = {default} ({kind})"
        text = " ".join((each.description or texts.get(each.alias or "", "")).split())
        lines.append(f"{shown}: {text}" if text else shown)
    return (
        [*lines, f"{field}.args.NAME: any further argument"]
        if form.model_config["extra"] == "allow"
        else lines
    )


def _list_parameters(function: Callable[..., Any], n_positional: int) -> list[Parameter] | None:
    """Return what may be given by name; None if the function does not say what it takes."""
    try:
        try:
            found = signature(function, eval_str=True)
        except Exception:  # noqa: BLE001 - annotations are foreign code
            # An annotation may need a name that is imported for type checkers alone.
            found = signature(function)
    except (TypeError, ValueError):
        return None
    others = list(found.parameters.values())[n_positional:]
    return [each for each in others if each.kind in (*_BY_NAME, Parameter.VAR_KEYWORD)]


@cache
def _make_form(function: Callable[..., Any], n_positional: int) -> "type[BaseModel]":
    """Make a model of a plug-in's arguments; its fields have them as aliases, because not every name can be a field's."""
    from pydantic import ConfigDict, Field, create_model

    fields: dict[str, Any] = {}
    parameters = _list_parameters(function, n_positional) or []
    for number, each in enumerate(parameters):
        if each.kind in _BY_NAME:
            kind = (
                Any
                if each.annotation is Parameter.empty or isinstance(each.annotation, str)
                else each.annotation
            )
            default = ... if each.default is Parameter.empty else each.default
            fields[f"argument_{number}"] = kind, Field(default, alias=each.name, title=each.name)
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    config = ConfigDict(extra="allow" if takes_any else "forbid", arbitrary_types_allowed=True)
    form: type[BaseModel] = create_model("Arguments", __config__=config, **fields)
    return form


def _describe(parameters: list[Parameter]) -> str:
    """Return what a plug-in takes, as its signature has it. Example: "power: float = 1.0, **more"; without any "no arguments"."""
    shown = []
    for each in parameters:
        is_annotated = get_origin(each.annotation) is Annotated
        shown.append(str(each.replace(annotation=get_args(each.annotation)[0]) if is_annotated else each))
    return ", ".join(shown) or "no arguments"
