"""However an attempt ends, Prefect shows nothing of it as running once the run resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import patient
import pytest

pytestmark = pytest.mark.service

FLOW = Path(__file__).with_name("hanging_flow.py")


class Server:
    """What Prefect's API returns about flow runs."""

    def __init__(self, api: str) -> None:
        self.api = api

    def state(self, flow_run: str) -> str:
        return str(patient.get(f"{self.api}/flow_runs/{flow_run}").json()["state_type"])

    def task_runs(self, flow_run: str) -> Counter[str]:
        """States of the task runs of a flow run."""
        body = {"flow_runs": {"id": {"any_": [flow_run]}}}
        found = patient.post(f"{self.api}/task_runs/filter", json=body).json()
        return Counter(each["state_type"] for each in found)

    def schedule(self, flow_run: str) -> None:
        body = {"state": {"type": "SCHEDULED"}, "force": True}
        patient.post(f"{self.api}/flow_runs/{flow_run}/set_state", json=body).raise_for_status()


@pytest.fixture(name="server")
def _server(prefect_api: str) -> Server:
    return Server(prefect_api)


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def start(server: Server, folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / ".tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(FLOW), str(folder), *words],
        env=os.environ | {"PREFECT_API_URL": server.api},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(server: Server, folder: Path, *words: str) -> str:
    """Run to the end; returns the output."""
    process = start(server, folder, *words)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def flow_runs(folder: Path) -> list[str]:
    try:
        return list(json.loads((folder / "flow_runs.json").read_text())["flow_runs"])
    except FileNotFoundError:
        return []


def end_hanging(server: Server, folder: Path, number: int) -> str:
    """End a flow by a signal while a step and its four rollouts hang; returns its flow run."""
    before = flow_runs(folder)
    process = start(server, folder, "hang")
    wait_until(lambda: flow_runs(folder) not in ([], before))
    flow_run = flow_runs(folder)[-1]
    wait_until(lambda: server.task_runs(flow_run) == {"RUNNING": 5})
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode != 0
    return flow_run


def test_the_next_start_marks_a_killed_attempt_and_its_task_runs_crashed(
    server: Server, tmp_path: Path
) -> None:
    killed = end_hanging(server, tmp_path, signal.SIGKILL)
    assert server.state(killed) == "RUNNING"
    run(server, tmp_path, "end")
    assert (server.state(killed), server.task_runs(killed)) == ("CRASHED", {"CRASHED": 5})
    (ours,) = flow_runs(tmp_path)
    assert (server.state(ours), server.task_runs(ours)) == ("COMPLETED", {"COMPLETED": 5})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_prefect_shows_nothing_as_running_after_a_signal(server: Server, tmp_path: Path, number: int) -> None:
    ended = end_hanging(server, tmp_path, number)
    wait_until(lambda: server.task_runs(ended) == {"CRASHED": 5})
    assert server.state(ended) == "CRASHED"


def test_a_retry_of_the_same_flow_run_marks_the_task_runs_of_the_attempt_before(
    server: Server, tmp_path: Path
) -> None:
    killed = end_hanging(server, tmp_path, signal.SIGKILL)
    server.schedule(killed)
    run(server, tmp_path, "end", killed)
    assert server.state(killed) == "COMPLETED"
    assert server.task_runs(killed) == {"CRASHED": 5, "COMPLETED": 5}


def test_flow_runs_that_this_server_does_not_know_are_forgotten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "flow_runs.json").write_text(json.dumps({"flow_runs": [str(uuid4())]}))
    run(server, tmp_path, "end")
    assert len(flow_runs(tmp_path)) == 1


def test_an_ended_flow_run_keeps_its_state(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, "end")
    (ended,) = flow_runs(tmp_path)
    run(server, tmp_path, "end")
    assert (server.state(ended), server.task_runs(ended)) == ("COMPLETED", {"COMPLETED": 5})


@pytest.mark.long
def test_a_killed_run_is_shown_as_crashed_and_the_resumed_one_as_complete(
    workplace: Any, server: Server
) -> None:
    folder = workplace.folder / "runs" / "small"
    process = workplace.start("run", "small")
    wait_until(lambda: any(folder.glob("rollouts/step=000001/*.arrow")), timeout_s=600)
    (killed,) = flow_runs(folder)
    process.kill()
    process.communicate(timeout=120)
    finished = workplace.run("run", "small")
    assert finished.returncode == 0, finished.stdout
    (ours,) = flow_runs(folder)
    assert server.state(killed) == "CRASHED"
    assert server.task_runs(killed).keys() <= {"CRASHED", "COMPLETED"}
    assert (server.state(ours), server.task_runs(ours).keys()) == ("COMPLETED", {"COMPLETED"})
    assert not workplace.processes()
