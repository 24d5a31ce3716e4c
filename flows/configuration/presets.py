"""Settings by name: what the YAML files in conf/ say, several of them joined.

A preset of the working folder is used before one of the same name that comes with Rollmill.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollmill.tasks.config import suggest
from rollmill.tasks.errors import ConfigError

PRESETS = Path("conf")
ALGORITHMS = PRESETS / "algorithms"
BUILT_IN = Path(__file__).parents[2] / "conf"
"""Folder of the presets that come with Rollmill."""
_ALGORITHM_FOLDERS = (ALGORITHMS, BUILT_IN / "algorithms")
_SUFFIXES = (".yaml", ".yml")


def preset_values(preset: str) -> dict[str, Any]:
    """Read the settings of a preset: a name in conf/ or conf/algorithms/, a YAML file's path, or several joined by +.

    If several parts set the same setting, the last one's value counts.

    Example: "quickstart+dapo" is conf/quickstart.yaml with the settings of conf/algorithms/dapo.yaml.

    Raises:
        ConfigError: one of them is missing, is given twice, or is not YAML.
    """
    values: dict[str, Any] = {}
    parts = _split(preset)
    if twice := [part for part, count in Counter(_find_preset(each) for each in parts).items() if count > 1]:
        raise ConfigError("preset", preset, f"{twice[0]} is given twice; give it once")
    for part in parts:
        values = merge_settings(values, _read_preset(part))
    return values


MOST_VALUES = 100_000
"""Most values of settings: nine lines of YAML whose aliases repeat each other have a billion."""


def parse_yaml(text: str) -> Any:
    """Parse settings.

    Raises:
        ValueError: in one line: the text is not YAML, gives a setting twice (YAML would take the last value), has a number that
            YAML reads differently than it looks, such as 012 (10) and 1:30 (90), or repeats too many values by aliases.
    """
    try:
        values = yaml.load(text, _SettingsLoader)
        n_values = _count_values(values, {})
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{error.problem} (line {line})") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    if n_values > MOST_VALUES:
        raise ValueError(f"with what its aliases repeat it has {n_values} values, more than {MOST_VALUES}")
    return values


def _count_values(value: object, counts: dict[int, int]) -> int:
    """Count the values in a value, itself included, and those that YAML's aliases repeat each time.

    `counts` has those of the mappings and lists so far by id, 0 for one that is being counted.

    Raises:
        ValueError: a value contains itself.
    """
    if not isinstance(value, dict | list):
        return 1
    known = counts.setdefault(id(value), 0)
    if known:
        return known
    inner = value.values() if isinstance(value, dict) else value
    for each in inner:
        if counts.get(id(each)) == 0:
            raise ValueError("a value contains itself")
        known += _count_values(each, counts)
    counts[id(value)] = 1 + known
    return 1 + known


class _SettingsLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [name for name, count in names.items() if count > 1]:
            raise _refuse(f"{twice[0]} is given twice", node)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        if ":" in text or re.match("[-+]?0[0-9_]", text):
            raise _refuse(
                f"{text} would be read as {super().construct_yaml_int(node)}: write that, or quote it", node
            )
        return int(super().construct_yaml_int(node))


_SettingsLoader.add_constructor("tag:yaml.org,2002:int", _SettingsLoader.construct_yaml_int)


def _refuse(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def merge_settings(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `others` added, section by section; a setting in both has the value in `others`.

    A plug-in with arguments replaces another one as a whole.
    """
    merged = dict(values)
    for name, other in others.items():
        mine = merged.get(name)
        if other is None and isinstance(mine, Mapping):
            # An empty section sets nothing.
            continue
        are_sections = isinstance(mine, Mapping) and isinstance(other, Mapping) and "args" not in other
        merged[name] = merge_settings(mine or {}, other) if are_sections else other
    return merged


def preset_name(preset: str) -> str:
    """Return the default name for a run of a preset. Example: "conf/mine.yaml+dapo" gives "mine-dapo"."""
    return "-".join(_name(part) for part in _split(preset))


def preset_task(preset: str) -> str:
    """Return the name of a preset's first part, which names the task. Example: "conf/mine.yaml+dapo" gives "mine"."""
    return _name(_split(preset)[0])


def are_algorithms(preset: str) -> bool:
    """Return True if all parts of a preset are names in conf/algorithms/, so that no part sets a task."""
    return all(_find_preset(part).parent in _ALGORITHM_FOLDERS for part in _split(preset))


def _split(preset: str) -> list[str]:
    # A file's path may have a + in it.
    return [preset] if Path(preset).is_file() else preset.split("+")


def _name(part: str) -> str:
    return Path(part).stem if part.endswith(_SUFFIXES) else part


def _read_preset(part: str) -> dict[str, Any]:
    path = _find_preset(part)
    try:
        values = parse_yaml(path.read_text()) or {}
    except (ValueError, OSError) as error:
        raise ConfigError("preset", part, f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("preset", part, f"{path} must contain settings as a mapping, such as `steps: 40`")
    return values


def _find_preset(part: str) -> Path:
    if part.endswith(_SUFFIXES):
        paths = [Path(part)]
    else:
        paths = [folder / f"{part}.yaml" for folder in (PRESETS, *_ALGORITHM_FOLDERS, BUILT_IN)]
    for path in paths:
        if path.is_file():
            return path
    presets, algorithms = _names(PRESETS, BUILT_IN), _names(*_ALGORITHM_FOLDERS)
    elsewhere = "" if PRESETS.is_dir() else "go to the project's folder, which has conf/ and runs/; "
    remedy = (
        f"there is no file {paths[0]}; {elsewhere}presets are: {presets}; algorithms to add to a preset with +: {algorithms}"
        f"{suggest(part, (*presets.split(', '), *algorithms.split(', ')))}"
    )
    raise ConfigError("preset", part, remedy)


def _names(*folders: Path) -> str:
    return ", ".join(sorted({each.stem for folder in folders for each in folder.glob("*.yaml")}))
