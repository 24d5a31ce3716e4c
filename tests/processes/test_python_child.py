"""Where a child process finds modules: the user's folders last, so that they shadow nothing."""

import subprocess
from pathlib import Path

import pytest

from rollmill.tasks.processes.python_child import child_environment, python_command

USERS = ("queue.py", "tasks.py", "flows/__init__.py", "tasks/__init__.py", "mine.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a program and with modules that have the names of others."""
    for name in USERS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError(__file__)")
    (tmp_path / "mine.py").write_text("VALUE = 7")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(
        "import queue, sys\n"
        "import mine\n"
        "import rollmill.flows, rollmill.tasks.errors\n"
        "print(__name__, sys.argv[1:], queue.Queue.__module__, mine.VALUE)\n"
    )
    return tmp_path


def test_a_child_runs_a_module_with_its_arguments_and_finds_user_code_after_the_standard_library(
    folder: Path,
) -> None:
    command = python_command("package.program", "--one", "two")
    done = subprocess.run(
        command, cwd=folder, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "__main__ ['--one', 'two'] queue 7\n", done.stderr


def test_a_child_finds_modules_where_its_parent_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder / "package"))
    done = subprocess.run(
        [*python_command("program")],
        cwd=folder,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "__main__ [] queue 7\n"
