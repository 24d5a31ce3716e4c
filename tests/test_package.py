"""What `pip install rollmill` brings: types, a licence, a version, and no other top-level package."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill.flows.cli import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


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
