"""Deployed to a real Prefect server, triggered from the command, run by a real worker."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import patient
import pytest
import yaml

pytestmark = pytest.mark.service

ROOT = Path(__file__).parents[2]
TERMINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
LONGEST_S = 600.0


@pytest.fixture
def deployed(workplace: Any) -> Any:
    """A workplace whose prefect.yaml is the product's, for the preset `small` and a separate work pool."""
    document = yaml.safe_load((ROOT / "prefect.yaml").read_text().replace("quickstart", "small"))
    document["definitions"]["pools"]["process"]["name"] = workplace.marker
    document["deployments"] = [each for each in document["deployments"] if each["name"] == "small"]
    (workplace.folder / "prefect.yaml").write_text(yaml.safe_dump(document))
    done = workplace.run("deploy")
    assert done.returncode == 0, done.stdout
    return workplace


@contextmanager
def worker(workplace: Any) -> Iterator[None]:
    """A worker of the workplace's pool, for as long."""
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", workplace.marker],
        cwd=workplace.folder,
        env=workplace.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=120)


def wait_until_over(api: str, run: str) -> dict[str, Any]:
    """A flow run, once it is over."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        found: dict[str, Any] = patient.get(f"{api}/flow_runs/{run}").json()
        if found["state_type"] in TERMINAL:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def trigger(workplace: Any, *words: str) -> tuple[str, str]:
    """The id of the flow run that `rollmill run small --deployment WORDS` has created, and all it said."""
    done = workplace.run("run", "small", "--deployment", *words)
    assert done.returncode == 0, done.stdout
    return done.stdout.split("/runs/flow-run/")[1].split()[0], done.stdout


def test_runs_of_one_gpu_set_follow_each_other_and_a_wrong_setting_is_refused_before_anything_starts(
    deployed: Any, prefect_api: str
) -> None:
    deployed.environment |= {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
    }
    models_before = set((deployed.folder / "models").iterdir())
    check_refusals(deployed, prefect_api)
    first, said = trigger(deployed, "--set", "store.root=s3://bucket/runs", "--name", "first")
    assert "no worker of the work pool" in said
    assert f"prefect worker start --pool {deployed.marker}" in said
    evaluation = patient.get(f"{prefect_api}/deployments/name/evaluate/small").json()
    config = evaluation["parameters"]["config"]
    config["advanced"]["rollout"]["max_in_flight"] = 1
    body = {"parameters": {"run_name": "second", "config": config}}
    created = patient.post(f"{prefect_api}/deployments/{evaluation['id']}/create_flow_run", json=body)
    assert created.is_success, created.text
    with worker(deployed):
        runs = [wait_until_over(prefect_api, first), wait_until_over(prefect_api, created.json()["id"])]

    assert [each["state_type"] for each in runs] == ["FAILED", "FAILED"]
    unreachable, contradiction = (each["state"]["message"] for each in runs)
    assert "store.root = 's3://bucket/runs': cannot write" in unreachable
    assert "check the server and AWS_ENDPOINT_URL, which names it" in unreachable
    assert "rollout.max_in_flight = 1: must be at least one group" in contradiction
    assert not (deployed.folder / "runs").exists()
    assert set((deployed.folder / "models").iterdir()) == models_before
    spans = [spans_of(prefect_api, each["id"]) for each in runs]
    assert spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0], "two runs at a time on one GPU set"


def spans_of(api: str, run: str) -> tuple[str, str]:
    """When a flow run was taken by a worker, and when it was over."""
    states = patient.get(f"{api}/flow_run_states/", params={"flow_run_id": run}).json()
    pending = [each["timestamp"] for each in states if each["type"] == "PENDING"]
    over = [each["timestamp"] for each in states if each["type"] in TERMINAL]
    return min(pending), max(over)


def check_refusals(deployed: Any, prefect_api: str) -> None:
    """What is wrong already before a worker has anything of it."""
    deployment = patient.get(f"{prefect_api}/deployments/name/post-train/small").json()
    config = deployment["parameters"]["config"] | {"steps": 0}
    body = {"parameters": {"run_name": "x", "config": config}}
    refused = patient.post(f"{prefect_api}/deployments/{deployment['id']}/create_flow_run", json=body)
    assert refused.status_code == 409
    assert "config.steps" in refused.text
    assert "0 is less than the minimum of 1" in refused.text

    unknown = deployed.run("run", "small", "--deployed-as", "large")
    assert unknown.returncode == 2
    assert "the Prefect server at" in unknown.stdout
    assert "--deployed-as" in unknown.stdout
    assert "`rollmill deploy`" in unknown.stdout

    queue = patient.get(f"{prefect_api}/work_pools/{deployed.marker}/queues/gpus").json()
    assert queue["concurrency_limit"] == 1
    other = deployed.run("deploy", "--pool", "slurm")
    assert other.returncode == 2
    assert "prefect.yaml has docker, kubernetes, process" in other.stdout
