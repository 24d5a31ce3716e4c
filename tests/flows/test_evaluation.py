"""The flow evaluate: a model as version 0 of a new run; tests/flows/test_post_train.py has a trained version."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rollmill.flows.policies.fixed_policy import find_wrong_weights
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.serve.policy_version import PolicyVersion
from tests.stubs.vllm_server import StubVllmServer

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
    assert "version 0 of runs/candidate, 8 held-out problems, 95 % intervals: reward" in evaluated.stdout
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


def test_servers_that_hold_the_model_already_are_used_and_others_are_refused(workplace: Any) -> None:
    server, port = StubVllmServer(save_character_tokenizer(workplace.folder / "served"), 0.0), free_port()
    control = server.serve(port)
    attached = ("--set", f"serve.urls=[http://127.0.0.1:{port}]")
    try:
        evaluated = workplace.run("evaluate", "small", "--name", "attached", *attached)
        assert evaluated.returncode == 0, evaluated.stdout
        assert len(evaluations(workplace.folder / "runs" / "attached")) == 16
        named = {asked.version for asked in server.asked} - {"start"}  # a warm-up comes before they are named
        assert [PolicyVersion.parse(name).version for name in named] == [0]

        server.name("elsewhere:2:7")
        refused = workplace.run("evaluate", "small", "--name", "other", *attached)
        assert refused.returncode != 0
        assert "it has the weights elsewhere:2:7" in refused.stdout
        assert "leave serve.urls empty" in refused.stdout
    finally:
        control.stop()


@pytest.mark.parametrize(
    ("name", "version", "is_held"),
    [
        ("default", 0, True),
        ("other:0:0", 0, True),
        ("run:2:0", 0, True),
        ("other:1:0", 0, False),
        ("run:1:3", 0, False),
        ("default", 4, False),
        ("run:1:4", 4, True),
        ("run:0:4", 4, True),
        ("run:1:3", 4, False),
        ("other:1:4", 4, False),
    ],
)
def test_a_server_holds_a_version_when_its_name_says_so_or_it_was_never_given_another(
    name: str, version: int, is_held: bool
) -> None:
    assert (not find_wrong_weights(name, PolicyVersion("run", 3, version))) is is_held


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["small", "--version", "4"], 2, "checkpoints of no version"),
        (["smal"], 2, "presets are: "),
    ],
)
def test_an_impossible_evaluation_is_refused_before_anything_starts(
    workplace: Any, words: list[str], status: int, message: str
) -> None:
    refused = workplace.run("evaluate", *words)
    assert refused.returncode == status
    assert message in refused.stdout
    assert not (workplace.folder / "runs").exists()
