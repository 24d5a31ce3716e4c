"""Actors of a Ray cluster collect a run, while one of them and then the flow are killed: each row is there once."""

import json
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from flow_processes import DEADLINE_S, Runs
from marked_processes import find_marked_processes

from rollmill.flows.prefect_integration.prefect_api import QUIET_TERMINAL, SHORT_RETRIES
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.verify.run_verification import verify_run
from tests.stubs.toy_settings import validate_toy
from tests.stubs.vllm_server import StubVllmServer

pytestmark = pytest.mark.service

STEPS, GROUPS, GROUP_SIZE = 3, 6, 4
STEP = GROUPS * GROUP_SIZE


def wait_for(is_there: Callable[[], bool], runs: Runs) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_there():
        assert time.monotonic() < deadline, runs.log.read_text()[-3000:]
        time.sleep(0.05)


def test_a_killed_actor_and_a_killed_flow_lose_and_double_nothing(
    tied_model: Path, tmp_path: Path, prefect_api: str
) -> None:
    server, port = StubVllmServer(tied_model, rollout_s=0.05), free_port()
    control = server.serve(port)
    config = validate_toy(
        {
            "steps": STEPS,
            "model": str(server.model),
            "rollout": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_in_flight": 8},
            "serve": {"urls": [f"http://127.0.0.1:{port}"]},
            "store": {"root": str(tmp_path / "runs")},
            "executor": {"kind": "ray", "actors": 2},
        }
    )
    folder, marker = RunFolder(f"{config.store.root}/ray"), f"ray-{uuid.uuid4().hex}"
    environment = os.environ | QUIET_TERMINAL | SHORT_RETRIES
    runs = Runs(tmp_path, config, environment | {"PREFECT_API_URL": prefect_api, "WORKPLACE": marker})

    def n_stored(step: int) -> int:
        return len(read(folder, "rollouts", ["group"], step=step))

    try:
        # The server holds all requests after those of one and a half steps.
        server.most = STEP + STEP // 2
        pid = runs.start("ray", "collect")
        wait_for(lambda: n_stored(1) >= GROUP_SIZE, runs)
        lost = json.loads(min(folder.writers.iterdir()).read_text())
        os.kill(lost["pid"], signal.SIGKILL)
        server.most = 2 * STEP + STEP // 2
        wait_for(lambda: n_stored(2) >= 1, runs)
        assert n_stored(1) == STEP
        os.kill(pid, signal.SIGKILL)
        assert runs.ended() == -signal.SIGKILL
        server.most = None
        runs.start("ray", "collect")
        assert runs.ended() == 0, runs.log.read_text()[-3000:]
    finally:
        runs.close()
        control.stop()
    assert "was lost: its groups go to others" in runs.log.read_text()
    found = verify_run(folder)
    assert (found.findings, found.notes) == ([], [])
    for dataset in ("rollouts", "scores"):
        ids = read(folder, dataset, ["trajectory_id"])["trajectory_id"].to_pylist()
        assert len(ids) == len(set(ids)) == STEPS * STEP
    assert not folder.writers.exists()
    assert not find_marked_processes(marker)
