"""A run folder from others is data: commands that look at it import nothing that its run.json names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.tasks.store.folders import RunFolder

Command = Callable[..., str]

PLANTED = "planted_code:Planted"


@pytest.fixture
def foreign_run(small_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, whose settings name a module that leaves a file when it is imported."""
    (tmp_path / "planted_code.py").write_text(
        "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "runs" / "foreign"
    shutil.copytree(small_run.local, folder)
    stored = json.loads((folder / "run.json").read_text())
    config = stored["config"]
    for section, name in (
        ("rollout", "environment"),
        ("score", "scorer"),
        ("score", "advantage"),
        ("train", "loss"),
        ("evaluate", "scorer"),
    ):
        config.setdefault(section, {})[name] = PLANTED
    (folder / "run.json").write_text(json.dumps(stored))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("inspect",),
        ("show", "0.0", "--tokens"),
        ("plot",),
        ("export", "--to", "jsonl", "--output", "OUTPUT"),
        ("compact", "--grace", "0"),
        ("verify",),
        ("sql", "from trajectories"),
    ],
)
def test_a_look_at_a_run_imports_no_code_that_it_names(
    rollmill: Command, foreign_run: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    command, *options = (each.replace("OUTPUT", str(tmp_path / "exported")) for each in words)
    said = rollmill(command, str(foreign_run), *options)
    assert not said.startswith("rollmill: ")
    assert not (tmp_path / "planted_code.ran").exists()


def test_a_command_that_starts_something_imports_it(
    rollmill: Command, foreign_run: Path, tmp_path: Path
) -> None:
    assert "score.scorer" in rollmill("rescore", str(foreign_run))
    assert (tmp_path / "planted_code.ran").exists()
