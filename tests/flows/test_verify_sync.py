"""`rollmill verify-sync` with a real trainer and a real vLLM server, both attached to."""

import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.settings import fixed_settings, validate
from tasks.serve.process import LaunchedProcess, free_port
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.run import OpenRun
from tasks.sync.config import SyncConfig
from tasks.train import launch
from tasks.train.config import TrainConfig

pytestmark = pytest.mark.service

TOKEN_ENV = TrainConfig().token_env


@pytest.fixture
def trainer_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    config, port, token = TrainConfig(), free_port(), secrets.token_hex(8)
    monkeypatch.setenv(TOKEN_ENV, token)
    process = LaunchedProcess.start(
        "trainer",
        launch.command(config, launch.write_config(config, SyncConfig(), port, tmp_path / "trainer")),
        log=tmp_path / "trainer" / "trainer.log",
        env=launch.environment(config, token),
        stop_grace_s=2.0,
    )
    yield f"http://127.0.0.1:{port}"
    process.stop_now()


@pytest.fixture
def run(vllm_server: Any, save_tiny: Callable[..., Path], trainer_url: str, tmp_path: Path) -> RunFolder:
    """A run that has no step yet, whose start model is of the served one's form and has other weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = save_tiny(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True, initializer_range=0.3)
    folder = RunFolder(tmp_path / "runs" / "small")
    config = validate(
        {
            "model": str(model),
            "start_model": {"enabled": False},
            "serve": {"urls": [vllm_server.url], "attach_timeout_s": 600.0},  # the trainer is only starting
            "train": {"url": trainer_url},
            "store": {"root": str(tmp_path / "runs")},
        }
    )
    OpenRun.open(
        folder,
        config=config.model_dump(mode="json"),
        fixed=fixed_settings(),
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
        r"version 0 is not on the servers as the trainer has it: server \S+: .*lm_head.* \(live\)",
        stale.stdout,
    )
    assert verified.returncode == 0, verified.stdout
    assert "version 0 is as the trainer has it on 1 of 1 servers" in verified.stdout
    assert shards(run) == before
    assert read_manifest(run).incarnation == incarnation + 2
