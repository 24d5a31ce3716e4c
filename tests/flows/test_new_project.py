"""`rollmill init` writes a project that runs outside of a checkout, and `rollmill new` user code with a test that passes."""

import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from rollmill.flows.commands.project_commands import init
from rollmill.flows.configuration.settings import load
from rollmill.flows.prefect_integration.deployments import FILE, render_deployments
from rollmill.flows.project.new_files import import_path, write_code, write_project
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.environment import make_environment
from rollmill.tasks.score.terms import resolve_terms

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
FILES = {
    ".gitignore",
    "README.md",
    "conf/mine.yaml",
    "digits.py",
    "in_place.py",
    "prefect.yaml",
    "pyproject.toml",
    "tests/test_digits.py",
    "tests/test_in_place.py",
}


def list_files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


def rollmill(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "rollmill", *words], cwd=folder, capture_output=True, check=False, text=True)


@pytest.mark.slow
def test_a_project_has_code_whose_tests_pass(tmp_path: Path) -> None:
    made = rollmill(tmp_path, "init", "demo")
    demo = tmp_path / "demo"
    assert (made.returncode, list_files(demo)) == (0, FILES)
    servers = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    setup = "" if servers.exists() else "rollmill setup && "
    assert made.stdout.splitlines()[-1] == f"Next: cd demo && {setup}rollmill run mine"
    serve = yaml.safe_load((demo / "conf" / "mine.yaml").read_text())["serve"]
    assert serve.get("python") == (str(servers) if servers.exists() else None)
    for kind, name in (("loss", "capped"), ("environment", "two_digits"), ("scorer", "mild")):
        written = rollmill(demo, "new", kind, name)
        assert written.returncode == 0
        assert written.stdout.endswith(f"={import_path(kind, name)}\n")
    tested = subprocess.run([BIN / "pytest", "-q"], cwd=demo, capture_output=True, check=False, text=True)
    assert tested.returncode == 0, tested.stdout
    assert "23 passed" in tested.stdout
    assert "dash" not in tested.stdout
    linted = subprocess.run(
        [BIN / "ruff", "check", "--isolated", "--select", "E,F,I,B,PT,UP", "--line-length", "130", "."],
        cwd=demo,
        check=False,
    )
    assert linted.returncode == 0


def test_the_preset_of_a_project_names_the_python_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tmp_path, "/my: folder #1/bin/python")
    monkeypatch.chdir(tmp_path)
    assert load("mine").serve.python == "/my: folder #1/bin/python"


def test_a_new_environment_says_that_it_is_an_example(tmp_path: Path) -> None:
    for file in write_code(tmp_path, "environment", "backwards"):
        assert "example, to be replaced" in file.read_text()


def test_the_preset_of_a_project_names_its_environment_and_its_scorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = load("mine")
    assert make_environment(config.rollout).name == "digits"
    assert resolve_terms(config.score).name == "in_place.in_place"


def test_an_environment_reads_its_arguments_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
    class Numbers:
        name, tools, stop = "numbers", (), ()
        def __init__(self, *, n: int): self.n = n
        def size(self, split): return self.n
    """
    (tmp_path / "sized_numbers.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    words = ("rollout.environment=sized_numbers:Numbers", "rollout.environment.args.n=12")
    assert make_environment(load("quickstart", words).rollout).size("train") == 12


def test_the_deployments_of_a_project_are_placed_and_run_as_those_of_the_checkout(tmp_path: Path) -> None:
    write_project(tmp_path)
    ours, theirs = (yaml.safe_load((each / FILE).read_text()) for each in (ROOT, tmp_path))
    assert theirs["definitions"]["pools"] == {"process": ours["definitions"]["pools"]["process"]}
    assert theirs["definitions"]["steps"] == ours["definitions"]["steps"]
    deployments = render_deployments(theirs, "process")["deployments"]
    known = {each["entrypoint"] for each in ours["deployments"]}
    assert [each["name"] for each in deployments] == ["mine", "mine"]
    assert {each["entrypoint"] for each in deployments} <= known


def test_the_next_commands_enter_a_folder_whose_name_has_a_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init(tmp_path / "my project")
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last)[1:4] == ["cd", str(tmp_path / "my project"), "&&"]


def test_existing_files_are_not_overwritten_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "in_place.py").write_text("mine")
    for write in (lambda: write_project(tmp_path), lambda: write_code(tmp_path, "scorer", "in_place")):
        with pytest.raises(ConfigError, match=r"in_place\.py.*it exists and is not overwritten"):
            write()
    assert list_files(tmp_path) == {"in_place.py"}


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("skorer", "a", "did you mean scorer"),
        ("scorer", "a-b", "it names a Python module"),
        ("scorer", "class", "it names a Python module"),
        ("scorer", "Mine", "it names a Python module"),
        ("scorer", "test_mine", "pytest would collect it"),
        ("scorer", "json", "an installed module has this name"),
        ("loss", "numpy", "an installed module has this name"),
    ],
)
def test_a_name_that_could_not_be_imported_is_refused(
    tmp_path: Path, kind: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_code(tmp_path, kind, name)
    assert not list_files(tmp_path)


@pytest.mark.service
def test_a_new_project_runs_outside_of_a_checkout(workplace: Any, tmp_path: Path) -> None:
    folder = workplace.folder / "demo"
    write_project(folder)
    (folder / ".venv-vllm").symlink_to(workplace.vllm_python.parent.parent)
    small = ("steps=1", "start_model.steps=1", "rollout.groups_per_step=4", "evaluate.every=0")
    process = subprocess.run(
        [BIN / "rollmill", "run", "mine", *(word for each in small for word in ("--set", each))],
        cwd=folder,
        env=workplace.environment,
        capture_output=True,
        check=False,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert rollmill(folder, "verify", "mine").returncode == 0
    assert "1 step trained" in rollmill(folder, "inspect", "mine").stdout
