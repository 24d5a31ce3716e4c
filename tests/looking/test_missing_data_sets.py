"""A run that lost a whole data set: the commands that read it report the loss, and end with a status that says so."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.flows import cli
from rollmill.tasks.store.folders import RunFolder

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    small_run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run `rollmill COMMAND RUN WORDS` on a copy of the small run without a data set; returns status and text."""

    def call(command: str, without: str, *words: str) -> tuple[int, str]:
        folder = tmp_path / "runs" / "run"
        shutil.copytree(small_run.local, folder)
        shutil.rmtree(folder / without)
        monkeypatch.chdir(tmp_path)
        # Wide enough for a path of any length.
        monkeypatch.setenv("COLUMNS", "400")
        monkeypatch.setattr("sys.argv", ["rollmill", command, str(folder), *words])
        with pytest.raises(SystemExit) as end:
            cli.run_command()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return call


@pytest.mark.parametrize(
    ("dataset", "finding"),
    [("rollouts", "rows have no rollout"), ("scores", "scores/scorer=addition@1/step=000001")],
)
def test_verify_finds_a_data_set_that_is_gone(dataset: str, finding: str, run: Run) -> None:
    status, text = run("verify", dataset)
    assert status == 1
    assert finding in text


@pytest.mark.parametrize("words", [("plot",), ("export", "--to", "jsonl")])
def test_what_shows_rollouts_refuses_a_run_without_them(words: tuple[str, ...], run: Run) -> None:
    status, text = run(words[0], "rollouts", *words[1:])
    assert status == 1
    assert "rollouts: the rollouts of 3 steps are gone, whose groups are stored: 0, 1, 2; restore" in text
    assert len(text.splitlines()) == 1


def test_other_data_sets_are_exported_without_rollouts(run: Run) -> None:
    assert run("export", "rollouts", "--to", "jsonl", "--dataset", "groups")[0] == 0


@pytest.mark.parametrize("grace", ["inf", "nan", "1e400"])
def test_an_endless_grace_is_refused(grace: str, run: Run) -> None:
    assert run("compact", "scores", "--grace", grace)[0] == 2
