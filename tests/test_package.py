"""What `pip install rollmill` brings: types, a licence, a version, and no other top-level package."""

import subprocess
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill.flows.cli import app
from rollmill.flows.project import uv_install

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


@pytest.mark.parametrize(
    ("build", "has_gpu", "is_cpu"),
    [("cuda", False, False), ("cpu", True, True), ("", True, False), ("", False, True)],
)
def test_torch_is_of_the_build_that_was_asked_for(
    build: str, has_gpu: bool, is_cpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An image for GPUs is made on a machine without one."""
    run = list[str]()
    compiled = subprocess.CompletedProcess([], 0, "torch==2.11.0\n", "")
    monkeypatch.setattr(uv_install, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(uv_install, "run_uv", lambda *words: run.extend(words))
    monkeypatch.setattr(uv_install.subprocess, "run", lambda *_, **__: compiled)
    (tmp_path / "constraints.txt").write_text("torch==2.11.0\n")
    uv_install.install(tmp_path, tmp_path / "constraints.txt", ["vllm"], build=build)
    assert ("--torch-backend" in run) == is_cpu
