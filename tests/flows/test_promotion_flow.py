"""The flow gate evaluates what has no evaluation; the flow promote pauses until a person answers in Prefect."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import patient
import polars as pl
import pytest
from stored_policies import draw_rewards, make_policy

from rollmill.flows.configuration.recipe import start_model_folder
from rollmill.flows.configuration.settings import load
from rollmill.flows.policies.policy_gate import PolicyGate
from rollmill.flows.policies.promotion import promote_policy
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.lineage.lineage_writer import write_lineage
from rollmill.tasks.store.lineage.policy_lineage import read_lineage
from rollmill.tasks.store.promotion.gate_record import GateRecord, read_gate
from rollmill.tasks.store.promotion.policy_alias import PolicyAlias

pytestmark = pytest.mark.service

LONGEST_S = 300.0
SCRIPT = "import asyncio, sys; from rollmill.flows.promote import promote; print(asyncio.run(promote(*sys.argv[1:])))"


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, RunFolder]:
    """A policy that is in production, and a candidate."""
    monkeypatch.chdir(tmp_path)
    first, second = (
        make_policy(tmp_path, name, draw_rewards(len(name), 600)) for name in ("first", "second")
    )
    alias = PolicyAlias("policies/production")
    assert PolicyGate(first.location).find_missing() is None
    PolicyGate(first.location).decide()
    promote_policy(first.location, alias, "")
    return first, second


@contextmanager
def promoting(api: str, candidate: RunFolder) -> Iterator["subprocess.Popen[str]"]:
    """The flow in another process."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, candidate.location],
        env=os.environ | {"PREFECT_API_URL": api},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_pause(api: str, candidate: RunFolder, process: "subprocess.Popen[str]") -> str:
    """Return the id of the flow run, once it is paused."""
    deadline = time.monotonic() + LONGEST_S
    named: dict[str, Any] = {
        "flow_runs": {"name": {"any_": [candidate.location]}, "state": {"type": {"any_": ["PAUSED"]}}}
    }
    while time.monotonic() < deadline and process.poll() is None:
        if found := patient.post(f"{api}/flow_runs/filter", json=named).json():
            return str(found[0]["id"])
        time.sleep(0.2)
    raise AssertionError(process.communicate()[0])


def find_gate(candidate: RunFolder, against: RunFolder) -> GateRecord:
    digests = (read_lineage(each).digest for each in (candidate, against))
    gate = read_gate(RunFolder("policies"), *digests)
    assert gate is not None
    return gate


@pytest.mark.parametrize("approve", [True, False])
def test_the_alias_moves_when_a_person_approves_it(
    policies: tuple[RunFolder, RunFolder], prefect_api: str, approve: bool
) -> None:
    first, second = policies
    with promoting(prefect_api, second) as process:
        run = wait_for_pause(prefect_api, second, process)
        assert Path("policies/production").resolve() == first.local
        question = patient.get(f"{prefect_api}/flow_runs/{run}/input/paused-approval-description").json()
        assert question.startswith(f"passed: {second.location} against {first.location}")
        answer = {"approve": approve, "approved_by": "ada", "note": "read ten answers"}
        done = patient.post(f"{prefect_api}/flow_runs/{run}/resume", json={"run_input": answer})
        assert done.json()["status"] == "ACCEPT", done.text
        said, _ = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 0, said
    assert f"/runs/flow-run/{run}" in said
    assert Path("policies/production").resolve() == (second if approve else first).local
    current = PolicyAlias("policies/production").current()
    assert current is not None
    assert (current.approved_by, current.note) == (("ada", "read ten answers") if approve else ("", ""))
    gate = find_gate(second, first)
    assert gate.reasons == (() if approve else ("ada did not approve it: read ten answers",))


def test_killed_between_gate_and_alias_nothing_is_moved_and_the_gate_is_kept(
    policies: tuple[RunFolder, RunFolder], prefect_api: str
) -> None:
    first, second = policies
    with promoting(prefect_api, second) as process:
        wait_for_pause(prefect_api, second, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    alias = PolicyAlias("policies/production")
    assert [record.policy for _, record in alias.history()] == [first.location]
    promote_policy(second.location, alias, "")
    assert Path("policies/production").resolve() == second.local


def test_policies_without_an_evaluation_are_evaluated_under_the_candidates_settings_once(
    workplace: Any, stub_python: str
) -> None:
    """The servers are stubs whose answers are all alike, so the policies are equal."""
    settings = ("--set", f"serve.python={stub_python}", "--set", "evaluate.n_prompts=64")
    done = workplace.run("evaluate", "small", "--name", "candidate", *settings)
    assert done.returncode == 0, done.stdout
    runs = workplace.folder / "runs"
    model = workplace.folder / start_model_folder(load(str(workplace.folder / "conf" / "small.yaml")))
    shutil.copytree(runs / "candidate", runs / "production")
    shutil.rmtree(runs / "production" / "evaluations")
    for name in ("candidate", "production"):
        policy = runs / name / "policies" / "version=000000"
        shutil.copytree(model, policy)
        (policy / "name.txt").write_text(name)
        write_lineage(policy, RunFolder(runs / name), 0, model)

    words = (
        "gate",
        "runs/candidate/policies/version=000000",
        "--against",
        "runs/production/policies/version=000000",
    )
    gated = workplace.run(*words)
    assert gated.returncode == 0, gated.stdout
    assert gated.stdout.count("passed: ") == 1
    (made,) = runs.glob("gate-*")
    n_rows = len(pl.scan_ipc(made / "evaluations/**/*.arrow").collect())
    assert n_rows == 128
    again = workplace.run(*words, "--json", "--min-reward", "2")
    assert again.returncode == 1
    found = json.loads(again.stdout)
    assert found["reasons"][0].endswith("at least 2 is required")
    assert (found["against"]["evaluated_in"], found["against"]["evaluated_version"]) == (str(made), 0)
    assert {path.name for path in runs.iterdir()} == {"candidate", "production", made.name}
