"""A run of three environments with the real vLLM and trainer, killed in the middle of a step."""

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_scorers, scan
from rollmill.tasks.store.run.manifest import read_manifest

pytestmark = [pytest.mark.service, pytest.mark.slow]

N_HELD_OUT = {"addition": 3, "calculator": 2, "guess": 2}
MIXED = {
    "steps": 2,
    "rollout": {"groups_per_step": 6, "max_in_flight": 4},
    "evaluate": {"every": 2, "n_prompts": 2, "samples": 2},
    "environments": {
        "addition": {
            "weight": 2,
            "rollout": {"environment": "addition", "temperature": 0.8},
            "score": {"scorer": "addition"},
            "evaluate": {"n_prompts": 3},
        },
        "calculator": {"rollout": {"environment": "calculator"}, "score": {"scorer": "calculator"}},
        "guess": {"rollout": {"environment": "guess"}, "score": {"scorer": "guess"}},
    },
}


def rows(run: Path, dataset: str) -> pl.DataFrame:
    return scan(RunFolder(str(run)), dataset).collect()


def test_a_run_of_three_environments_killed_in_a_step_has_exact_shares_and_a_curve_of_each(
    workplace: Any,
) -> None:
    (workplace.folder / "conf" / "mixed.yaml").write_text(yaml.safe_dump(MIXED))
    run = workplace.folder / "runs" / "small-mixed"
    killed = workplace.start("run", "small+mixed")
    deadline = time.monotonic() + 600
    while not len(rows(run, "rollouts")) >= 4 and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=300)
    before = rows(run, "rollouts")
    assert not len(rows(run, "batches"))

    resumed = workplace.run("run", "small+mixed")
    assert resumed.returncode == 0, resumed.stdout
    rollouts = rows(run, "rollouts")
    assert set(before["trajectory_id"]) <= set(rollouts["trajectory_id"])
    assert rollouts["trajectory_id"].is_unique().all()
    shares = [
        Counter(rollouts.filter(pl.col("step") == step).unique("group")["env"].to_list()) for step in (0, 1)
    ]
    assert shares == [
        {"addition": 3, "calculator": 2, "guess": 1},
        {"addition": 3, "calculator": 1, "guess": 2},
    ]
    temperatures = rollouts.select("env", pl.col("temperature").cast(pl.Float64).round(3)).unique()
    assert dict(temperatures.iter_rows()) == {"addition": 0.8, "calculator": 1.0, "guess": 1.0}
    evaluations = rows(run, "evaluations").filter(pl.col("policy_version") == 2)
    assert Counter(evaluations["env"].to_list()) == {env: 3 * n for env, n in N_HELD_OUT.items()}
    measured = rows(run, "metrics").filter(pl.col("name") == "train/trained_tokens")
    assert {"all", "addition"} <= set(measured["env"].to_list())
    # The trainer's probabilities are the servers', at the temperature of each row.
    first = rows(run, "metrics").filter(
        (pl.col("name") == "train/first_ratio_deviation") & (pl.col("env") == "all")
    )
    assert first["value"].max() < 1e-3
    folder = RunFolder(str(run))
    described = "addition: addition@1, calculator: calculator@1, guess: guess@1"
    assert read_manifest(folder).scorers == dict.fromkeys(list_scorers(folder), described)
    verified = workplace.run("verify", "small-mixed")
    assert verified.returncode == 0, verified.stdout
    assert "could not be fully checked" not in verified.stdout
    shown = workplace.run("inspect", "small-mixed", "--evaluations")
    assert all(env in shown.stdout for env in ("all", *N_HELD_OUT)), shown.stdout
