"""A run's settings from presets and overrides, checked; every setting by its dotted name."""

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rollmill.flows.configuration.config import CONSTANTS, FOREIGN, GONE, RENAMED, RunConfig
from rollmill.flows.configuration.environment_config import read_entries
from rollmill.flows.configuration.presets import are_algorithms, parse_yaml, preset_values
from rollmill.flows.configuration.rules import check_config
from rollmill.tasks.config import ADDRESS, LINK, VARIABLE, VARIABLES, StageConfig, may_be_secret, suggest
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.train.config import TrainConfig, settings_by_step
from rollmill.tasks.user_code.plug_in import FORM, PlugIn

HIDDEN = "***"
NAMES_VARIABLE = (
    "give the name of the environment variable that holds the secret (ROLLMILL_*, *_KEY or *_TOKEN, in capital letters, digits and "
    "_), not the secret"
)
NAMES_VARIABLES = "give names of environment variables, or beginnings of names as NAME_*, without values"

UNREAD_BY_COLLECT = frozenset({"train", "checkpoint", "evaluate", "sync", "retrain"})
"""Sections that the flow collect does not read: its form does not show them, resuming its runs does not compare them."""

SETTINGS_BY_STEP = settings_by_step(TrainConfig())
"""Defaults, by dotted name, of the settings that a step is trained under and that may change between two steps."""

# Of two names, from 0 to 1, for one to be suggested for the other.
LEAST_LIKENESS = 0.75

Config = TypeVar("Config", bound=StageConfig)


def load(preset: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a preset (see preset_values), apply `key.subkey=value` overrides, and check it all.

    Example: load("quickstart+dapo", ("train.lr=1e-6", "steps=2"))

    Raises:
        ConfigError: the preset is missing, or a setting is unknown, out of range or contradicts another.
    """
    values = apply_overrides(preset_values(preset), overrides)
    if are_algorithms(preset) and not {"model", "start_model"} & values.keys():
        remedy = f"an algorithm has no model and no task; combine it with a preset that has both: quickstart+{preset}"
        raise ConfigError("preset", preset, remedy)
    return validate(values)


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of settings with `key.subkey=value` overrides applied; ConfigError for one of another form.

    A section, or a plug-in's name, is set before the settings in it, in whatever order they are given; of two values of one
    setting the later one holds.
    """
    values = copy.deepcopy(values)
    # A run stores its environments as a list; an override names one.
    entries = values.get("environments")
    if isinstance(entries, list) and _have_names(entries):
        values["environments"] = {each.pop("name"): each for each in entries}
    known = values.get("environments")
    names = list(known) if isinstance(known, dict) else []
    for override in sorted(overrides, key=lambda each: each.partition("=")[0].count(".")):
        _apply_override(values, override)
    if names and isinstance(changed := values["environments"], dict):
        for name in set(changed) - set(names):
            _check_new_environment(name, changed[name], names)
    return values


def scorer_overrides(scorer: str) -> tuple[str, ...]:
    """Return the overrides that the option `--scorer` means; it replaces a weighted sum, too. Later overrides change it."""
    return (f"score.scorer={scorer}", "score.sum=[]") if scorer else ()


def _have_names(entries: Sequence[object]) -> bool:
    """Return True if all entries have names, each another one; the others are refused when they are read."""
    names = [each.get("name") if isinstance(each, dict) else None for each in entries]
    return all(isinstance(each, str) for each in names) and len(set(names)) == len(names)


def _check_new_environment(name: str, entry: object, known: Sequence[str]) -> None:
    """Refuse an environment that overrides add to others without saying which it is: its name is misspelt; raises ConfigError."""
    rollout = entry.get("rollout") if isinstance(entry, dict) else None
    if not isinstance(rollout, dict) or "environment" not in rollout:
        remedy = f"the run has the environments {', '.join(known)}{suggest(name, known)}; a further one needs its rollout.environment"
        raise ConfigError(f"environments.{name}", "", remedy)


def validate(values: dict[str, Any], *, trains: bool = True) -> RunConfig:
    """Make a RunConfig of settings, with all checks, also those between several stages' settings.

    Args:
        values: the settings by section and name.
        trains: False where nothing is trained, as for `check_config`.

    Raises:
        ConfigError: names the first wrong field, its value and what is allowed.
    """
    config = parse_settings(RunConfig, values)
    check_config(config, trains=trains)
    return config


@contextmanager
def name_override(folder: RunFolder, overrides: Sequence[str]) -> Iterator[None]:
    """Make a ConfigError within about a setting that the run in `folder` stores say which override replaces it."""
    try:
        yield
    except ConfigError as error:
        # An override may give the name or one argument of a plug-in.
        if any(each.startswith((f"{error.field}=", f"{error.field}.")) for each in overrides):
            raise
        stored = folder.path("run.json")
        if error.field.partition(".args")[0] in settings():
            remedy = f"{stored} has this value: replace it with --set {error.field}=VALUE"
        elif error.field in RENAMED | CONSTANTS | GONE:
            remedy = f"{stored} has this setting: change it there, because --set cannot remove it"
        else:
            raise
        raise ConfigError(error.field, error.value, f"{error.remedy}; {remedy}") from None


def parse_settings(model: type[Config], values: dict[str, Any]) -> Config:
    """Make an instance of `model` from settings; ConfigError names the first wrong field, its value and what is allowed."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "moved_setting":
            moved = first["ctx"]
            value = HIDDEN if may_be_secret(moved["field"], moved["value"]) else moved["value"]
            raise ConfigError(moved["field"], value, moved["remedy"]) from None
        # pydantic appends its name of the kind of a JSON value.
        place = (
            first["loc"][:-1]
            if first["type"] == "finite_number" and first["loc"][-1] == "float"
            else first["loc"]
        )
        field = ".".join(_name_entries(values, place))
        value, remedy = _mask_refused(field, first)
        raise ConfigError(field, value, f"{remedy}{_suggest(model, field, first)}") from None


def _name_entries(values: Mapping[str, Any], parts: Sequence[int | str]) -> list[str]:
    """Return the parts of a setting's dotted name, with an environment's name in place of its number."""
    names = [str(part) for part in parts]
    if parts[0] == "environments" and len(parts) > 1:
        entries = read_entries(values["environments"])
        entry = entries[int(parts[1])] if isinstance(entries, list | tuple) else None
        if isinstance(entry, Mapping) and "name" in entry:
            names[1] = str(entry["name"])
    return names


# By pydantic's type of error, where its own words are about Python.
_REMEDIES = {
    "extra_forbidden": "there is no such setting",
    "model_type": "this is a section: give its settings by name, SECTION.NAME=VALUE",
    "tuple_type": "give a list: [first,second]",
}


def _mask_refused(field: str, error: ErrorDetails) -> tuple[object, str]:
    """Return the refused value, masked if it may be a secret, and what is allowed in its place."""
    value = error["input"]
    if error["type"] == "secret":
        return HIDDEN, error["msg"]
    if error["type"] == "dict_type" and field.endswith(".args"):
        return value, "give a mapping of arguments, such as {limit: 100}"
    pattern = error.get("ctx", {}).get("pattern")
    if pattern in (VARIABLE, VARIABLES):
        return HIDDEN, NAMES_VARIABLE if pattern == VARIABLE else NAMES_VARIABLES
    if pattern == ADDRESS:
        remedy = "write the address with its scheme, as http://host:port or https://host/path"
        return HIDDEN if may_be_secret(field, value) else value, remedy
    if pattern == LINK:
        return value, "write the address as http://host:port, without spaces, quotes, brackets, | and \\"
    return HIDDEN if may_be_secret(field, value) else value, _REMEDIES.get(error["type"], error["msg"])


def settings(model: type[StageConfig] = RunConfig) -> dict[str, bool]:
    """Return every setting by its dotted name; True for those that cannot change when a run is resumed."""
    return {name: _is_fixed(field) for name, field in _fields(model)}


def _fields(model: type[StageConfig], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of every setting, those of sections included."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, StageConfig):
            yield from _fields(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def find_fixed_settings(*, trains: bool = True) -> dict[str, object]:
    """Return the defaults, by dotted name, of the settings that cannot change when a run is resumed.

    Args:
        trains: False for a run of the flow collect, without the sections that it does not read.
    """
    defaults = RunConfig().model_dump(mode="json")
    return {
        name: get_setting(defaults, name, None)
        for name, is_fixed in settings().items()
        if is_fixed and (trains or name.partition(".")[0] not in UNREAD_BY_COLLECT)
    }


def describe(config: RunConfig | None = None, arguments: Mapping[str, Sequence[str]] = {}) -> Iterator[str]:
    """Yield a line for each setting of a run: name, value as `--set` takes it, whether it cannot change on resume, meaning.

    Without `config` the values are the defaults. `arguments` are lines about the arguments of plug-ins, by the setting that names one; they follow it.
    """
    values = (config or RunConfig()).model_dump(mode="json")
    for name, field in _fields(RunConfig):
        mark = " (fixed)" if _is_fixed(field) else ""
        value = json.dumps(get_setting(values, name, None), ensure_ascii=False)
        yield f"{name} = {value}{mark}: {field.description}"
        for setting, lines in arguments.items():
            if f"{setting}.".startswith(f"{name}."):
                yield from lines


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError("--set", override, "write it as key=value, for example train.lr=1e-6")
    *sections, name = key.split(".")
    for section, inner in pairwise([*sections, name]):
        if inner in ("name", "args") and isinstance(given := values.get(section), str):
            # A plug-in without arguments is given by its name alone.
            values[section] = {"name": given}
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            remedy = f"{section} is a single setting, not a section"
            parent = key.rpartition(".")[0]
            if _is_plug_in(parent):
                remedy = f"an argument is below args: give {parent}.args.{name}"
            raise ConfigError("--set", override, remedy)
    values[name] = parse_value(text)


def parse_value(text: str) -> Any:
    """Parse an override's value as YAML; an unquoted text that Python reads as a number, such as 1e-6, becomes a float."""
    try:
        value = parse_yaml(text) if text else ""
    except ValueError as error:
        raise ConfigError("--set", text, f"the value is not YAML: {error}") from error
    if str(value).count("#") < text.count("#"):
        remedy = (
            "YAML reads what follows # as a comment: quote the text within the value too, as KEY='\"a #1\"'"
        )
        raise ConfigError("--set", text, remedy)
    if isinstance(value, str) and value == text.strip():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _is_plug_in(field: str) -> bool:
    """Return True for the name of a setting that names a plug-in, of one environment too."""
    names = (name for name, each in _fields(RunConfig) if each.annotation is PlugIn)
    return any(f".{field}".endswith(f".{name}") for name in names)


def _suggest(model: type[StageConfig], field: str, error: ErrorDetails) -> str:
    """Return "; did you mean NAME?" with a similar setting or choice; empty for none, or for other kinds of errors."""
    if error["type"] == "extra_forbidden":
        section, _, last = field.rpartition(".")
        if _is_plug_in(section) or last == "args":
            return f"; a plug-in has its arguments in args: {FORM}"
        names = list(settings(model))
        return _suggest_setting(field, [*names, *{name.rpartition(".")[0] for name in names} - {""}])
    if error["type"] == "literal_error":
        return suggest(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    return ""


def _suggest_setting(field: str, names: Sequence[str]) -> str:
    """Return the end of a message that suggests the setting or section most like `field`, or where all settings are listed.

    A similar name of the same section is preferred. Otherwise the last part of the name decides among all sections, since whole
    names of one section resemble each other.
    """
    section = field.rpartition(".")[0]
    if foreign := FOREIGN.get(field.rpartition(".")[2]):
        return f"; it is {foreign} here"
    if suggested := suggest(
        field, [name for name in names if name.rpartition(".")[0] == section], LEAST_LIKENESS
    ):
        return suggested
    last = [name.rpartition(".")[2] for name in names]
    close = difflib.get_close_matches(field.rpartition(".")[2], last, n=1, cutoff=LEAST_LIKENESS)
    if not close:
        return (
            "; `rollmill settings` lists all, docs/reference/glossary.md the names of TRL, verl and prime-rl"
        )
    same = [name for name, its_last in zip(names, last, strict=True) if its_last == close[0]]
    return suggest(field, same, cutoff=0.0)


def _is_fixed(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return bool(isinstance(extra, dict) and extra["fixed"])
