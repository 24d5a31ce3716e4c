"""The whole loop with real parts: Prefect, vLLM, DeepSpeed, Arrow; interrupted in every way."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rollmill.tasks.look.ledger.step_attribution import build_ledger

pytestmark = pytest.mark.service

STEPS, GROUPS, GROUP_SIZE = 16, 6, 4
# Long enough to be interrupted four times.
RUN = ("run", "small", "--set", f"steps={STEPS}")


def scan(run: Path) -> pl.LazyFrame:
    """A user's plain scan, in which compaction can show a row twice until the run's end."""
    return pl.scan_ipc(run / "rollouts/**/*.arrow", hive_partitioning=True)


def rollouts(run: Path) -> pl.DataFrame:
    """What a user's plain scan sees in the middle of a run."""
    if not list(run.glob("rollouts/*/*.arrow")):
        return pl.DataFrame({"trajectory_id": [], "step": []})
    return scan(run).unique("trajectory_id").collect()


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 600.0
) -> None:
    """Wait for something that a running command does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"the command ended: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def inspect(workplace: Any, run: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(workplace.run("inspect", run, "--json").stdout)
    return shown


def the_process(workplace: Any, words: str) -> int:
    """The one process of a workplace whose command line has these words."""
    (pid,) = [pid for pid, line in workplace.processes().items() if words in line]
    return pid


def test_a_run_survives_ctrl_c_sigkill_and_the_death_of_both_services(
    workplace: Any, stub_python: str
) -> None:
    run = workplace.folder / "runs" / "small"

    interrupted = workplace.start(*RUN)
    wait_until(lambda: len(rollouts(run)) > 0, interrupted)
    interrupted.send_signal(signal.SIGINT)
    output, _ = interrupted.communicate(timeout=300)
    assert interrupted.returncode != 0
    assert "Traceback" not in output, output
    assert not workplace.processes()
    before_kill = rollouts(run)

    killed = workplace.start(*RUN)
    wait_until(lambda: rollouts(run)["step"].n_unique() > 1, killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=300)
    wait_until_gone(workplace)
    stored = rollouts(run)
    same = stored.join(before_kill, on="trajectory_id", how="semi").sort("trajectory_id")
    assert same.equals(before_kill.sort("trajectory_id"))

    n_steps = stored["step"].n_unique()
    resumed = workplace.start(*RUN)
    wait_until(lambda: rollouts(run)["step"].n_unique() > n_steps, resumed)
    os.kill(the_process(workplace, "VLLM::EngineCore"), signal.SIGKILL)
    wait_until(lambda: rollouts(run)["step"].n_unique() > n_steps + 1, resumed)
    os.kill(
        the_process(
            workplace,
            "-u -m rollmill.tasks.processes.python_child rollmill.tasks.train.service.trainer_process",
        ),
        signal.SIGKILL,
    )
    output, _ = resumed.communicate(timeout=900)
    assert resumed.returncode == 0, output

    assert f"resuming {run.relative_to(workplace.folder)}" in output, output
    # The kill came before or after the last step's batch was stored.
    assert "resuming at step " in output, output
    check_said(run, output)
    check_finished(workplace, run, stored)
    check_time_of_restarts(run)
    reseeded = workplace.run(*RUN, "--set", "seed=5")
    assert reseeded.returncode == 1
    assert "seed: the run has 0, given is 5" in reseeded.stdout
    again = workplace.run(*RUN)
    assert again.returncode == 1
    assert f"has done all its {STEPS} steps" in again.stdout
    check_evaluable(workplace, run, stub_python)
    verified = workplace.run("verify", "small")
    assert verified.returncode == 0, verified.stdout


def check_said(run: Path, output: str) -> None:
    """A run names its page in Prefect, and the seconds of a step are those that it stores."""
    said = " ".join(output.split())
    assert re.search(r"flow run: http://\S+/flow-run/", said), output
    metrics = pl.scan_ipc(run / "metrics/**/*.arrow").filter(name="time/step_s").collect()
    stored = {(step, f"{value:.1f}") for step, value in metrics.select("step", "value").iter_rows()}
    steps = re.findall(rf"step (\d+) \(\d+ of {STEPS}\): reward \S+ \S+ tok/s, (\S+) s", said)
    assert steps, output
    assert {(int(step), seconds) for step, seconds in steps} <= stored


def check_time_of_restarts(run: Path) -> None:
    """Of a server and a trainer that died the time has owners, too."""
    spans = pl.scan_ipc(run / "spans/**/*.arrow", hive_partitioning=True).unique().collect()
    ledger = build_ledger(spans)
    restarted = ledger.owners.filter(name="starting").join(ledger.steps, on="step", suffix="_of_step")
    # A server that starts again may do so in two steps, the second of which begins meanwhile.
    assert set(restarted["process"].str.slice(0, 7)) == {"http://", "trainer"}
    both = ledger.owners.join(restarted, on=["step", "process"], how="semi")
    unowned = both.filter(name="unattributed")["us"].sum()
    assert unowned <= 0.02 * restarted["us_of_step"].sum()


def check_evaluable(workplace: Any, run: Path, stub_python: str) -> None:
    """A checkpoint of the finished run is evaluated, and the run stays finished."""
    words = ("evaluate", "small", "--set", f"serve.python={stub_python}", "--version")
    there_is_none = workplace.run(*words, "5")
    assert there_is_none.returncode == 2
    assert "has checkpoints of 14, 16; give one of them" in there_is_none.stdout
    evaluated = workplace.run(*words, "14")
    assert evaluated.returncode == 0, evaluated.stdout
    assert "version 14 of runs/small, 8 held-out problems, 95 % intervals: reward" in evaluated.stdout
    rows = pl.scan_ipc(run / "evaluations/**/*.arrow").collect()
    assert sorted(rows["policy_version"].unique()) == [0, 4, 8, 12, 14, 16]
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def wait_until_gone(workplace: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := workplace.processes():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def check_finished(workplace: Any, run: Path, stored: pl.DataFrame) -> None:
    """Every trajectory once, the stored ones untouched, versions right, and the summary adds up."""
    rows = scan(run).collect()
    assert len(rows) == rows["trajectory_id"].n_unique() == STEPS * GROUPS * GROUP_SIZE
    for dataset in ("rollouts", "scores", "groups", "metrics"):
        folders = {path.parent for path in run.glob(f"{dataset}/**/*.arrow")}
        assert len(list(run.glob(f"{dataset}/**/*.arrow"))) == len(folders) == STEPS, dataset
    assert (
        rows.join(stored, on="trajectory_id", how="semi")
        .sort("trajectory_id")
        .equals(stored.sort("trajectory_id"))
    )
    assert (rows["policy_version_first"] == rows["step"]).all()
    assert (rows["policy_version_last"] == rows["step"]).all()
    masked = rows.select(pl.col("loss_mask").list.sum() == pl.col("n_completion_tokens"))
    assert masked.to_series().all()
    shown = inspect(workplace, str(run))
    assert (shown["steps"], shown["policy_version"], shown["trajectories"]) == (STEPS, STEPS, len(rows))
    assert shown["by_status"].keys() <= {"complete", "truncated"}
    assert [each["step"] for each in shown["held_out"]] == [0, 4, 8, 12, 16]
    checkpoint = json.loads((run / "checkpoints" / f"version={STEPS:06d}" / "COMPLETE.json").read_text())
    metrics = pl.scan_ipc(run / "metrics/**/*.arrow", hive_partitioning=True).collect()
    trained = metrics.filter(pl.col("name") == "train/updated")
    assert sorted(trained["step"]) == list(range(STEPS))
    assert checkpoint["n_updates"] == trained["value"].sum(), "an update was applied twice, or not at all"
    differences = metrics.filter(pl.col("name") == "sync/logprob_difference")["value"]
    assert differences.max() < 1e-4
    assert {"submit/last_start_s", "submit/ranks_last_start_s"} <= set(metrics["name"])
    booked = pl.scan_ipc(run / "spans/**/*.arrow").filter(pl.col("name") == "submitting").collect()
    assert set(booked["lane"]) == {"submitting servers", "submitting ranks"}


def test_a_server_that_cannot_be_brought_back_ends_the_run_with_its_last_log_lines(workplace: Any) -> None:
    run = workplace.folder / "runs" / "small"
    running = workplace.start("run", "small", "--set", "max_restarts=0")
    wait_until(lambda: len(rollouts(run)) > 0, running)
    os.kill(the_process(workplace, "VLLM::EngineCore"), signal.SIGKILL)
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 1
    assert "vLLM server" in output
    assert "last log lines:" in output
    assert "Traceback (most recent call last)" not in output.split("last log lines:")[0]
    # Each open request would log the engine's death, with a traceback that grows with each.
    assert "Engine Exception caught" not in (run / "logs" / "vllm-0.log").read_text()
    assert len(rollouts(run)) > 0
    assert inspect(workplace, str(run))["trajectories"] == len(rollouts(run))


def test_steps_that_overlap_stay_within_their_staleness_also_when_one_of_two_servers_dies(
    workplace: Any,
) -> None:
    run = workplace.folder / "runs" / "small"
    words = ("run", "small", "--set", "rollout.max_staleness=1", "--set", "rollout.trajectories_per_task=2")
    words += ("--set", "steps=5", "--set", "evaluate.every=1", "--set", "rollout.env_workers=1")
    running = workplace.start(*words, "--set", "serve.servers=2")
    wait_until(lambda: len(rollouts(run)) > 0, running, timeout_s=900.0)
    killed, _ = (pid for pid, line in workplace.processes().items() if "VLLM::EngineCore" in line)
    os.kill(killed, signal.SIGKILL)
    output, _ = running.communicate(timeout=900)
    assert running.returncode == 0, output
    assert "starting it again" in output
    assert {log.name for log in (run / "logs").glob("vllm-*")} == {"vllm-0.log", "vllm-1.log"}

    rows = scan(run).collect()
    assert len(rows) == rows["trajectory_id"].n_unique() == 5 * GROUPS * GROUP_SIZE
    staleness = rows["step"] - rows["policy_version_first"]
    assert staleness.min() >= 0
    assert staleness.max() == 1
    assert [each["step"] for each in inspect(workplace, str(run))["held_out"]] == [0, 1, 2, 3, 4, 5]
    evaluations = pl.scan_ipc(run / "evaluations/**/*.arrow", hive_partitioning=True).collect()
    assert (evaluations["policy_version"] == evaluations["policy_version_first"]).all()
    assert (evaluations["policy_version"] == evaluations["policy_version_last"]).all()
