"""Who can reach what the services open."""

import secrets
from pathlib import Path

import psutil
import pytest

from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service import launch
from rollmill.tasks.train.service.trainer_client import TrainerClient


def list_listening_addresses() -> set[str]:
    """Addresses at which descendants of this process accept TCP connections."""
    found: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        try:
            found |= {each.laddr.ip for each in process.net_connections("tcp") if each.status == "LISTEN"}
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.service
async def test_a_launched_trainer_listens_on_loopback_alone(tmp_path: Path) -> None:
    config, port, token = TrainConfig(ranks=2), free_port(), secrets.token_hex(8)
    process = LaunchedProcess.start(
        "trainer",
        launch.build_command(config, launch.write_config(config, SyncConfig(), port, tmp_path)),
        log=tmp_path / "trainer.log",
        env=launch.build_environment(config, token),
    )
    try:
        async with TrainerClient(f"http://127.0.0.1:{port}", token, timeout_s=60) as client:
            await client.wait_until_healthy(300, process)
            assert list_listening_addresses() == {"127.0.0.1"}
    finally:
        await process.stop()
