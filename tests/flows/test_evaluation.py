"""The flow evaluate: a model as version 0 of a run of its own; tests/flows/test_post_train.py has a trained version."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

pytestmark = pytest.mark.service


def evaluations(run: Path) -> pl.DataFrame:
    return pl.scan_ipc(run / "evaluations/**/*.arrow").collect().sort("trajectory_id")


def test_a_model_is_evaluated_without_a_trainer_and_what_is_stored_is_kept(
    workplace: Any, stub_python: str
) -> None:
    run = workplace.folder / "runs" / "candidate"
    servers = ("--set", f"serve.python={stub_python}")

    evaluated = workplace.run("evaluate", "small", "--name", "candidate", *servers)
    assert evaluated.returncode == 0, evaluated.stdout
    assert "version 0 of runs/candidate: held-out reward" in evaluated.stdout
    rows = evaluations(run)
    assert (len(rows), rows["greedy"].sum()) == (16, 8)
    assert rows["policy_version"].unique().to_list() == [0]
    assert {path.name for path in run.iterdir()} & {"rollouts", "batches", "checkpoints"} == set()

    again = workplace.run("evaluate", "candidate", *servers)
    assert again.returncode == 0, again.stdout
    assert evaluations(run).equals(rows)
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    verified = workplace.run("verify", "candidate")
    assert verified.returncode == 0, verified.stdout


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["small", "--set", "serve.urls=[http://127.0.0.1:9]"], 2, "starts servers of its own"),
        (["small", "--version", "4"], 2, "checkpoints of no version"),
        (["smal"], 2, "presets are: small"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_anything_starts(
    workplace: Any, words: list[str], status: int, told: str
) -> None:
    refused = workplace.run("evaluate", *words)
    assert refused.returncode == status
    assert told in refused.stdout
    assert not (workplace.folder / "runs").exists()
