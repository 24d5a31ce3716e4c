"""Files that `rollmill init` and `rollmill new` write: a project outside of a checkout, and user code with its test."""

import json
import keyword
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from string import Template

from rollmill.tasks.config import suggest
from rollmill.tasks.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
SETTINGS = {"scorer": "score.scorer", "environment": "rollout.environment", "loss": "train.loss"}
"""What can be written, and the setting that names it."""
# Names in the preset of a new project.
ENVIRONMENT, SCORER, PRESET = "digits", "in_place", "mine"


def write_project(folder: Path, vllm_python: str = "") -> list[Path]:
    """Write a project: a preset, its deployments, an environment, a scorer, tests, a README; returns the files.

    Args:
        folder: where to write them.
        vllm_python: serve.python of the preset; empty: the default.

    Raises:
        ConfigError: the folder has one of the files, or cannot be written to. Nothing is written then.
    """
    name = folder.resolve().name
    # A JSON string is a YAML string.
    python = f"  python: {json.dumps(vllm_python, ensure_ascii=False)}\n" if vllm_python else ""
    texts = {
        Path("README.md"): _fill("README.md", project=name),
        Path(".gitignore"): _fill("gitignore"),
        Path("pyproject.toml"): _fill("pyproject.toml"),
        Path("prefect.yaml"): _fill("prefect.yaml", preset=PRESET),
        Path("conf") / f"{PRESET}.yaml": _fill("mine.yaml", python=python),
    }
    texts |= _fill_code("environment", ENVIRONMENT) | _fill_code("scorer", SCORER)
    return _write(folder, texts)


def write_code(folder: Path, kind: str, name: str) -> list[Path]:
    """Write NAME.py with a scorer, an environment or a loss, and tests/test_NAME.py; returns both files.

    Raises:
        ConfigError: the kind is unknown, the name cannot be that of a module or would be collected by pytest, or a file exists. Nothing is written then.
    """
    if kind not in SETTINGS:
        raise ConfigError("KIND", kind, f"give {', '.join(SETTINGS)}{suggest(kind, SETTINGS)}")
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        remedy = "it names a Python module: use small letters, digits and _, and begin with a letter"
        raise ConfigError("NAME", name, remedy)
    if name.startswith("test"):
        raise ConfigError(
            "NAME", name, "pytest would collect it as a test; give a name that does not begin with test"
        )
    texts = _fill_code(kind, name)
    if not (folder / f"{name}.py").exists() and find_spec(name) is not None:
        raise ConfigError(
            "NAME", name, "an installed module has this name and would be imported; give another"
        )
    return _write(folder, texts)


def import_path(kind: str, name: str) -> str:
    """Return what a setting names to use a file of `write_code`.

    Example: "two_digits:TwoDigits" for the environment two_digits.
    """
    return f"{name}:{_class_name(name) if kind == 'environment' else name}"


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _fill_code(kind: str, name: str) -> dict[Path, str]:
    words = {"name": name, "class_name": _class_name(name)}
    return {
        Path(f"{name}.py"): _fill(f"{kind}.py", **words),
        Path("tests") / f"test_{name}.py": _fill(f"test_{kind}.py", **words),
    }


def _fill(template: str, **words: str) -> str:
    return Template((TEMPLATES / f"{template}.txt").read_text()).substitute(words)


def _write(folder: Path, texts: Mapping[Path, str]) -> list[Path]:
    for file in texts:
        if (folder / file).exists():
            raise ConfigError(
                "FILE", str(folder / file), "it exists and is not overwritten; give another name, or move it"
            )
    try:
        for file, text in texts.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
    except OSError as error:
        raise ConfigError("FOLDER", str(folder), f"it cannot be written to ({error.strerror})") from error
    return [folder / file for file in texts]
