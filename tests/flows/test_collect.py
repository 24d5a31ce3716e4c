"""The flow collect: killed and resumed, nothing is lost or duplicated; another run can train from it."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from flow_processes import DEADLINE_S, Runs
from typer.testing import CliRunner

from rollmill.flows.cli import app
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.offline.draws import GroupPool
from rollmill.flows.prefect_integration.prefect_api import QUIET_TERMINAL, SHORT_RETRIES
from rollmill.flows.run.folder import check_resumable
from rollmill.tasks.errors import RunMismatchError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.verify.run_verification import verify_run
from tests.stubs.toy_settings import validate_toy
from tests.stubs.vllm_server import StubVllmServer

pytestmark = pytest.mark.service

STEPS, GROUPS, GROUP_SIZE = 3, 6, 4


@pytest.fixture(scope="module")
def server(tied_model: Path) -> StubVllmServer:
    return StubVllmServer(tied_model, rollout_s=0.05)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, server: StubVllmServer) -> Iterator[RunConfig]:
    port = free_port()
    control = server.serve(port)
    yield validate_toy(
        {
            "steps": STEPS,
            "model": str(server.model),
            "rollout": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_in_flight": 4},
            "serve": {"urls": [f"http://127.0.0.1:{port}"]},
            "store": {"root": str(tmp_path_factory.mktemp("collect") / "runs")},
        }
    )
    control.stop()


@pytest.fixture(scope="module")
def collected(
    config: RunConfig, server: StubVllmServer, tmp_path_factory: pytest.TempPathFactory, prefect_api: str
) -> RunFolder:
    """A run that was killed in its second step, while the server held its requests, and resumed."""
    server.most = (GROUPS + 2) * GROUP_SIZE
    folder = RunFolder(f"{config.store.root}/killed")
    environment = os.environ | QUIET_TERMINAL | SHORT_RETRIES | {"PREFECT_API_URL": prefect_api}
    runs = Runs(tmp_path_factory.mktemp("flows"), config, environment)
    try:
        pid = runs.start("killed", "collect")
        deadline = time.monotonic() + DEADLINE_S
        while len(read(folder, "rollouts", ["group"], step=1)) < GROUP_SIZE:
            assert time.monotonic() < deadline, runs.log.read_text()[-3000:]
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert runs.ended() == -signal.SIGKILL
        assert not verify_run(folder).findings
        server.most = None
        runs.start("killed", "collect")
        assert runs.ended() == 0, runs.log.read_text()[-3000:]
    finally:
        runs.close()
    return folder


def test_a_killed_collection_resumes_and_has_each_trajectory_once(collected: RunFolder) -> None:
    found = verify_run(collected)
    assert (found.findings, found.notes) == ([], [])
    for dataset in ("rollouts", "scores"):
        ids = read(collected, dataset, ["trajectory_id"])["trajectory_id"].to_pylist()
        assert len(ids) == len(set(ids)) == STEPS * GROUPS * GROUP_SIZE
    assert len(read(collected, "groups", ["group"])) == STEPS * GROUPS
    assert list_steps(collected, "batches") == []
    manifest = read_manifest(collected)
    assert manifest.status == "finished"
    assert not {"train", "checkpoint", "sync", "retrain"} & manifest.config.keys()


def test_a_step_of_a_collection_that_lost_its_rows_is_found(collected: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(collected.local, copy.local)
    for shard in copy.local.glob("groups/step=000001/*.arrow"):
        shard.unlink()
    assert any("planned groups have no row" in each.what for each in verify_run(copy).findings)


def test_another_run_can_draw_from_a_collection(collected: RunFolder, config: RunConfig) -> None:
    retrain = config.retrain.model_copy(
        update={"sources": (collected.location,), "scores": "addition@1", "groups_per_step": 4}
    )
    pool = GroupPool.read(config.model_copy(update={"retrain": retrain}))
    assert len(pool.groups) + pool.left_out.total() == STEPS * GROUPS
    assert pool.groups


def test_a_run_that_trains_does_not_resume_a_collection(collected: RunFolder, config: RunConfig) -> None:
    longer = config.model_copy(update={"steps": STEPS + 1})
    with pytest.raises(RunMismatchError, match="rollmill retrain"):
        check_resumable(collected, longer)
    check_resumable(collected, longer, trains=False)


def test_inspect_shows_a_collection(collected: RunFolder) -> None:
    shown = CliRunner().invoke(app, ["inspect", collected.location], catch_exceptions=False)
    assert f"{STEPS} steps collected, {STEPS * GROUPS * GROUP_SIZE} trajectories" in " ".join(
        shown.output.split()
    )
    assert isinstance(pl.scan_ipc(f"{collected.location}/rollouts/**/*.arrow").collect(), pl.DataFrame)
