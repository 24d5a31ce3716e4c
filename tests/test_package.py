"""What `pip install rollmill` brings: types, a licence, a version, and no other top-level package."""

import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill.flows.cli import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(distributions: dict[str, Path]) -> zipfile.ZipFile:
    """The wheel of this checkout."""
    return zipfile.ZipFile(distributions["wheel"])


def test_the_command_prints_its_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"rollmill {version('rollmill')}\n")


@pytest.mark.slow
def test_the_wheel_installs_one_package_with_its_types(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    information = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} - information == {"rollmill"}
    assert "rollmill/py.typed" in names
    assert {"rollmill/flows/cli.py", "rollmill/tasks/errors.py"} <= set(names)


@pytest.mark.slow
def test_the_wheel_has_its_licence_and_its_authors(wheel: zipfile.ZipFile) -> None:
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(path).decode())
    assert (metadata["License-Expression"], metadata["Author"]) == ("Apache-2.0", "The Rollmill authors")
    licence = wheel.read(path.replace("METADATA", "licenses/LICENSE")).decode()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


@pytest.mark.slow
def test_the_source_distribution_has_what_the_wheel_is_made_of(
    wheel: zipfile.ZipFile, distributions: dict[str, Path]
) -> None:
    with tarfile.open(distributions["sdist"]) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    modules = {name.removeprefix("rollmill/") for name in wheel.namelist() if name.endswith(".py")}
    assert {name for name in modules if name != "__init__.py"} <= files
    assert {"pyproject.toml", "LICENSE", "README.md"} <= files
