"""Runs damaged at random: each command reports it in one message and a status that is not 0, or does its work."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollmill.flows import cli
from rollmill.tasks.store.folders import RunFolder

COMMANDS = [
    *(
        ["inspect"],
        ["inspect", "--groups"],
        ["inspect", "--trajectories"],
        ["inspect", "--trajectories", "--json"],
    ),
    *(
        ["show", "0.0"],
        ["show", "5.3", "--json"],
        ["spans"],
        ["spans", "--json"],
        ["verify"],
        ["verify", "--json"],
    ),
    *(["plot"], ["export", "--to", "jsonl"], ["export", "--to", "parquet"], ["compact", "--grace", "0.1"]),
]
LONGEST_MESSAGE = 5000


def flip(file: Path, share: float) -> None:
    """Change one bit of one byte."""
    content = bytearray(file.read_bytes())
    if content:
        content[min(int(share * len(content)), len(content) - 1)] ^= 1 << int(share * 997) % 8
    file.write_bytes(content)


def cut(file: Path, share: float) -> None:
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def remove(file: Path, share: float) -> None:
    file.unlink()


def remove_folder(file: Path, share: float) -> None:
    shutil.rmtree(file.parent)


def replace_by_folder(file: Path, share: float) -> None:
    file.unlink()
    file.mkdir()


def replace_by_other(file: Path, share: float) -> None:
    """Put the content of another file of the run there."""
    others = sorted(each for each in file.parents[2].rglob("*") if each.is_file())
    file.write_bytes(others[min(int(share * len(others)), len(others) - 1)].read_bytes())


def fill(file: Path, share: float) -> None:
    file.write_bytes(bytes([int(share * 255)]) * 1000)


def link_to_nothing(file: Path, share: float) -> None:
    file.unlink()
    file.symlink_to("/nowhere")


DAMAGES = [
    flip,
    flip,
    flip,
    cut,
    cut,
    remove,
    remove_folder,
    replace_by_folder,
    replace_by_other,
    fill,
    link_to_nothing,
]
Damage = Callable[[Path, float], None]
Check = Callable[[int, Damage, float, list[str]], None]


@pytest.fixture
def check(
    small_run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Check:
    """Damage one file of a copy of the small run, and run one command on it."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "run"

    def one(number: int, damage: Damage, share: float, words: list[str]) -> None:
        shutil.rmtree(run, ignore_errors=True)
        for made in tmp_path.glob("run-*"):
            shutil.rmtree(made)
        shutil.copytree(small_run.local, run)
        # run.json is one of many files: it comes up as often as all others together.
        files = sorted(each for each in run.rglob("*") if each.is_file())
        file = run / "run.json" if number % 4 == 0 else files[number % len(files)]
        damage(file, share) if file.parent != run or damage is not remove_folder else file.unlink()
        monkeypatch.setattr("sys.argv", ["rollmill", words[0], str(run), *words[1:]])
        with pytest.raises(SystemExit) as end:
            cli.run_command()
        said = capsys.readouterr()
        assert end.value.code in (0, 1, 2, None)
        assert "Traceback" not in said.out + said.err
        if end.value.code and words[0] != "verify":
            assert 0 < len(said.err) < LONGEST_MESSAGE
        if end.value.code in (0, None) and words[0] != "verify":
            assert said.out

    return one


def within(budget_s: float, check: Check) -> Check:
    """Check what comes until the time is used up, and nothing afterwards."""
    end = time.monotonic() + budget_s
    return lambda *drawn: check(*drawn) if time.monotonic() < end else None


ARGUMENTS = (st.integers(0, 999), st.sampled_from(DAMAGES), st.floats(0.0, 1.0), st.sampled_from(COMMANDS))
UNHURRIED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.mark.slow
def test_drawn_damage_is_one_message_of_each_command(check: Check) -> None:
    timed = within(8.0, check)

    # The same examples each time, so that a change is what makes it fail.
    @settings(max_examples=150, derandomize=True, suppress_health_check=UNHURRIED, phases=[Phase.generate])
    @given(*ARGUMENTS)
    def draw(number: int, damage: Damage, share: float, words: list[str]) -> None:
        timed(number, damage, share, words)

    draw()


@pytest.mark.long
def test_damage_that_nobody_has_drawn_yet_is_one_message_of_each_command(check: Check) -> None:
    end = time.monotonic() + 240.0

    @settings(max_examples=100, suppress_health_check=UNHURRIED, database=None)
    @given(*ARGUMENTS)
    def draw(number: int, damage: Damage, share: float, words: list[str]) -> None:
        check(number, damage, share, words)

    while time.monotonic() < end:
        draw()
