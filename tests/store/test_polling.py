"""Readers that poll all through a run with compaction, which is killed or not: none of them ever fails."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.shards.shard_names import list_superseded_shards

HERE = Path(__file__).parent
STEPS, ROWS = 24, 8
N_KILLS = 5


def start_run(run: Path, grace_s: float, compact: str) -> "subprocess.Popen[str]":
    """Start a run in a separate process."""
    words = [HERE / "compacting_run.py", run, STEPS, ROWS, grace_s, compact]
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *map(str, words)], stdin=pipe, stdout=pipe, text=True)


def end(process: "subprocess.Popen[str]") -> None:
    """Let a run end once its steps are done."""
    assert process.communicate(timeout=120)[0].endswith("done\n")
    assert process.returncode == 0


@contextmanager
def poll(run: Path, readers: Sequence[str]) -> Iterator[None]:
    """Poll with readers in separate processes; every one must have read, and none failed.

    They start before the run: on a busy machine their imports can take longer than a whole run.
    """
    polling = [
        subprocess.Popen(
            [sys.executable, str(HERE / "polling_reader.py"), str(run), reader],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for reader in readers
    ]
    try:
        for each in polling:
            assert each.stdout is not None
            each.stdout.readline()
        yield
    finally:
        outputs = [each.communicate(timeout=60) for each in polling]
    for reader, process, (n_reads, error) in zip(readers, polling, outputs, strict=True):
        assert process.returncode == 0, f"{reader}: {error}"
        assert int(n_reads) > 0


def wait_for_acknowledgements(run: Path, n: int) -> None:
    """Wait until so many rows are acknowledged, or all of the run."""
    acknowledged = run.parent / "acknowledged"
    while not acknowledged.exists() or acknowledged.read_text().count("\n") < min(n, STEPS * ROWS):
        time.sleep(0.005)


def shards_in(run: Path) -> list[str]:
    return open_files(RunFolder(run)).keys("rollouts/*/*.arrow")


def check_finished(run: Path) -> None:
    """Every row once for everybody, one shard a step, nothing superseded left."""
    everything = sorted(f"{step}.{n}" for step in range(STEPS) for n in range(ROWS))
    assert sorted(read(RunFolder(run), "rollouts")["trajectory_id"].to_pylist()) == everything
    scanned = pl.scan_ipc(run / "rollouts/**/*.arrow", hive_partitioning=True).collect()
    assert sorted(scanned["trajectory_id"]) == everything
    assert (len(shards_in(run)), list_superseded_shards(shards_in(run))) == (STEPS, [])


@pytest.mark.slow
def test_plain_readers_that_poll_all_through_the_steps_of_a_run_with_compaction_never_fail(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with poll(run, ["polars", "duckdb"]):
        process = start_run(run, 0.1, "at_end")
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
    assert list_superseded_shards(shards_in(run))
    assert process.communicate(timeout=120) == ("", None)
    check_finished(run)


@pytest.mark.slow
def test_readers_that_use_names_never_fail_while_superseded_shards_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with poll(run, ["polars by names", "duckdb by names", "rollmill"]):
        end(start_run(run, 8.0, "after_grace"))
    check_finished(run)


@pytest.mark.slow
def test_a_run_killed_during_compaction_shows_every_acknowledged_row_exactly_once_at_any_time(
    tmp_path: Path,
) -> None:
    run, rng, acknowledged = tmp_path / "run", random.Random(11), 0
    with poll(run, ["rollmill"]):
        for number in range(N_KILLS):
            process = start_run(run, 0.2, "at_end" if number % 2 else "after_grace")
            wait_for_acknowledgements(run, acknowledged + rng.randint(1, STEPS * ROWS // N_KILLS // 2))
            process.kill()
            process.communicate(timeout=60)
            assert process.returncode == -signal.SIGKILL
            acknowledged = (tmp_path / "acknowledged").read_text().count("\n")
        end(start_run(run, 0.2, "after_grace"))
    check_finished(run)
