"""Settings by name: what the YAML files in conf/ say, several of them joined."""

from pathlib import Path
from typing import Any

import yaml

from tasks.errors import ConfigError

PRESETS = Path("conf")
ALGORITHMS = PRESETS / "algorithms"
_SUFFIXES = (".yaml", ".yml")


def preset_values(preset: str) -> dict[str, Any]:
    """What a preset says: a name in conf/ or conf/algorithms/, the path of a YAML file, or several of them joined by +.

    Of a setting that several have the last one's value counts.

    Example: "quickstart+dapo" is conf/quickstart.yaml with the settings of conf/algorithms/dapo.yaml.

    Raises:
        ConfigError: one of them is missing, or is not YAML.
    """
    parts = [preset] if Path(preset).is_file() else preset.split("+")
    values: dict[str, Any] = {}
    for part in parts:
        _join(values, _values_of(part))
    return values


def preset_name(preset: str) -> str:
    """What a run of a preset is called by default. Example: "conf/mine.yaml+dapo" is "mine-dapo"."""
    parts = [preset] if Path(preset).is_file() else preset.split("+")
    return "-".join(Path(part).stem if part.endswith(_SUFFIXES) else part for part in parts)


def task_of(preset: str) -> str:
    """The name of a preset's task, its first part. Example: "conf/mine.yaml+dapo" is "mine"."""
    part = preset if Path(preset).is_file() else preset.split("+")[0]
    return Path(part).stem if part.endswith(_SUFFIXES) else part


def are_algorithms(preset: str) -> bool:
    """True when a preset has no task's settings: all its parts are names in conf/algorithms/."""
    parts = [preset] if Path(preset).is_file() else preset.split("+")
    return all(_path_of(part).parent == ALGORITHMS for part in parts)


def _values_of(part: str) -> dict[str, Any]:
    path = _path_of(part)
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("preset", part, f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("preset", part, f"{path} must hold settings by name, such as `steps: 40`")
    return values


def _path_of(part: str) -> Path:
    if part.endswith(_SUFFIXES):
        paths = [Path(part)]
    else:
        paths = [folder / f"{part}.yaml" for folder in (PRESETS, ALGORITHMS)]
    for path in paths:
        if path.is_file():
            return path
    names = _names(PRESETS) or f"none in {PRESETS.absolute()}"
    algorithms = f"; to be joined to one of them with +: {_names(ALGORITHMS)}" if _names(ALGORITHMS) else ""
    raise ConfigError("preset", part, f"there is no file {paths[0]}; presets are: {names}{algorithms}")


def _names(folder: Path) -> str:
    return ", ".join(sorted(each.stem for each in folder.glob("*.yaml")))


def _join(values: dict[str, Any], others: dict[str, Any]) -> None:
    for name, other in others.items():
        if isinstance(other, dict) and isinstance(values.get(name), dict):
            _join(values[name], other)
        else:
            values[name] = other
