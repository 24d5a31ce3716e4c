"""`rollmill verify-sync` with a real trainer and a real vLLM server, both attached to."""

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollmill.flows.configuration.settings import find_fixed_settings
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.service import launch
from rollmill.tasks.train.service.trainer_client import TrainerClient
from tests.stubs.toy_settings import validate_toy

pytestmark = pytest.mark.service

TOKEN_ENV = launch.TOKEN_ENV


@pytest.fixture
def trainer_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    config, port, token = validate_toy({}).train, free_port(), secrets.token_hex(8)
    monkeypatch.setenv(TOKEN_ENV, token)
    process = LaunchedProcess.start(
        "trainer",
        launch.build_command(config, launch.write_config(config, SyncConfig(), port, tmp_path / "trainer")),
        log=tmp_path / "trainer" / "trainer.log",
        env=launch.build_environment(config, token),
        stop_grace_s=2.0,
    )
    url = f"http://127.0.0.1:{port}"

    async def wait() -> None:
        async with TrainerClient(url, token, timeout_s=60.0) as client:
            await client.wait_until_healthy(600.0, process)

    try:
        asyncio.run(wait())
        yield url
    finally:
        process.stop_now()


@pytest.fixture
def run(vllm_server: Any, save_tiny: Callable[..., Path], trainer_url: str, tmp_path: Path) -> RunFolder:
    """A run that has no step yet, whose start model is of the served one's form and has other weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = save_tiny(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True, initializer_range=0.3)
    folder = RunFolder(tmp_path / "runs" / "small")
    config = validate_toy(
        {
            "model": str(model),
            "start_model": {"steps": 0},
            "serve": {"urls": [vllm_server.url]},
            "train": {"url": trainer_url},
            "store": {"root": str(tmp_path / "runs")},
        }
    )
    OpenRun.open(
        folder,
        config=config.model_dump(mode="json"),
        fixed=find_fixed_settings(),
        versions={},
        git_commit="",
        config_of=config.store,
    ).close()
    return folder


def shards(folder: RunFolder) -> set[str]:
    return {str(path) for path in Path(folder.location).rglob("*") if path.name not in ("run.json", "lock")}


def test_servers_are_verified_and_what_is_stale_in_one_is_named(
    workplace: Any, run: RunFolder, vllm_server: Any
) -> None:
    workplace.environment[TOKEN_ENV] = os.environ[TOKEN_ENV]

    def use_repairs(*names: str) -> None:
        body = {"method": "use_repairs", "args": names}
        httpx.post(f"{vllm_server.url}/collective_rpc", json=body, timeout=60.0).raise_for_status()

    before, incarnation = shards(run), read_manifest(run).incarnation
    use_repairs("repack_experts")
    stale = workplace.run("verify-sync", run.location)
    use_repairs("repack_heads", "repack_experts")
    verified = workplace.run("verify-sync", run.location)

    assert stale.returncode == 1, stale.stdout
    assert re.search(
        r"version 0 differs from the trainer's on servers: server \S+: .*lm_head.* \(live\)",
        stale.stdout,
    )
    assert verified.returncode == 0, verified.stdout
    assert "version 0 equals the trainer's on 1 of 1 servers" in verified.stdout
    assert shards(run) == before
    assert read_manifest(run).incarnation == incarnation + 2
