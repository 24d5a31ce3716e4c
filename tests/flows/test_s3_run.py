"""A whole run whose data sets and checkpoints are on S3, killed, and resumed where nothing of it is on a disk."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.resume import list_complete_checkpoints

pytestmark = pytest.mark.service

STEPS, GROUPS, GROUP_SIZE = 8, 6, 4


def wait_until(
    condition: Callable[[], bool], process: "subprocess.Popen[str]", timeout_s: float = 900.0
) -> None:
    """Wait for something that a running command does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"the command ended: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def trajectories(run: RunFolder) -> set[str]:
    return set(read(run, "rollouts", ["trajectory_id"])["trajectory_id"].to_pylist())


def test_a_killed_run_on_s3_resumes_from_another_scratch_folder(s3_root: str, workplace: Any) -> None:
    run = RunFolder(f"{s3_root}/small")
    words = ("run", "small", "--set", f"store.root={s3_root}", "--set", f"steps={STEPS}")

    workplace.environment["ROLLMILL_SCRATCH"] = str(workplace.folder / "first")
    killed = workplace.start(*words)
    wait_until(lambda: len(list_complete_checkpoints(run)) > 0, killed)
    n_stored = len(trajectories(run))
    wait_until(lambda: len(trajectories(run)) > n_stored, killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    while workplace.processes():
        time.sleep(0.1)
    stored = trajectories(run)

    workplace.environment["ROLLMILL_SCRATCH"] = str(workplace.folder / "second")
    resumed = workplace.run(*words, timeout_s=900.0)
    assert resumed.returncode == 0, resumed.stdout
    assert f"{run.location}/rollouts" in resumed.stdout

    rows = read(run, "rollouts", ["trajectory_id", "step", "policy_version_first"])
    ids = rows["trajectory_id"].to_pylist()
    assert stored <= set(ids)
    assert len(ids) == len(set(ids)) == STEPS * GROUPS * GROUP_SIZE
    assert rows["step"].to_pylist() == rows["policy_version_first"].to_pylist()
    assert list_complete_checkpoints(run)[-1] == STEPS
    kept = list((workplace.folder / "second").glob("**/checkpoints/version=*"))
    assert [each.name for each in kept] == [f"version={STEPS:06d}"]

    shown = workplace.run("inspect", run.location, "--json")
    assert json.loads(shown.stdout)["trajectories"] == len(ids)
    again = workplace.run(*words, "--again")
    assert again.returncode == 2
    assert "is on S3, where many objects cannot be renamed" in again.stdout
