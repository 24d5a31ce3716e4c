"""A tiny model, batches in a run's folder, and a trainer service that is kept for the module."""

import json
import secrets
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stored_step import Branch, Row, replace_shard, uneven_rows, write_step

from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_messages import WeightOffer
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service import launch
from rollmill.tasks.train.service.trainer_client import TrainerClient

VOCABULARY = 57
RECEIVE_S = 60.0


class RunningTrainer(NamedTuple):
    client: TrainerClient
    process: LaunchedProcess


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def run_trainer(
    tmp_path: Path,
) -> Callable[..., AbstractAsyncContextManager[RunningTrainer]]:
    """Launch a trainer service, and end it afterwards."""

    @asynccontextmanager
    async def running(
        config: TrainConfig, sync: SyncConfig | None = None, *, port: int = 0, **more: float
    ) -> AsyncIterator[RunningTrainer]:
        port, token = port or free_port(), secrets.token_hex(8)
        path = launch.write_config(config, sync or SyncConfig(), port, tmp_path / "logs", **more)
        process = LaunchedProcess.start(
            "trainer",
            launch.build_command(config, path),
            log=tmp_path / "logs" / "trainer.log",
            env=launch.build_environment(config, token),
            stop_grace_s=2.0,
        )
        try:
            async with TrainerClient(f"http://127.0.0.1:{port}", token, timeout_s=300.0) as client:
                await client.wait_until_healthy(300.0, process)
                yield RunningTrainer(client, process)
        finally:
            await process.stop()

    return running


def pids_of_ranks(process: LaunchedProcess) -> dict[int, int]:
    """Process id of each rank below a launched trainer."""
    found: dict[int, int] = {}
    for pid in sorted(int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()):
        if _is_below(pid, process.pid):
            with suppress(OSError):  # it has ended meanwhile
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for rank in (int(word[5:]) for word in words if word.startswith(b"RANK=")):
                    found.setdefault(rank, pid)  # what it starts has its environment too
    return found


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor


@pytest.fixture(scope="session")
def rank_pids() -> Callable[[LaunchedProcess], dict[int, int]]:
    return pids_of_ranks


@pytest.fixture(scope="session")
def receive_weights() -> Callable[..., dict[str, Any]]:
    """Take what a trainer sends to the only worker of a server, as a server's worker does; not before `may_begin` is set."""
    import torch

    from rollmill.tasks.sync.weight_messages import WeightUpdateRequest, encode_plan
    from rollmill.tasks.sync.weight_receiver import open_links
    from tests.stubs.transfer_ends import receive_tensors

    def receive(
        offer: WeightOffer, prefix: str, may_begin: threading.Event | None = None
    ) -> dict[str, torch.Tensor]:
        order = WeightUpdateRequest(
            "run:1:1",
            "keep",
            "tcp",
            encode_plan(offer.plan),
            RECEIVE_S,
            RECEIVE_S,
            None,
            offer.host,
            offer.port,
            prefix,
        )
        links = open_links(order, offer.plan, 0)
        if may_begin:
            assert may_begin.wait(RECEIVE_S)
        return dict(
            receive_tensors(links, offer.plan, torch.empty(offer.plan.total_bytes, dtype=torch.uint8))
        )

    return receive


class Batches(NamedTuple):
    """What tests need to store rows to train on."""

    row: type[Row]
    uneven_rows: Callable[..., list[Row]]
    write_step: Callable[..., str]
    write_shard: Callable[..., None]
    branch: type[Branch]


@pytest.fixture(scope="session")
def batches() -> Batches:
    return Batches(Row, uneven_rows, write_step, replace_shard, Branch)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[[str, int, dict[str, object]], None]:
    """Run a script from this folder on ranks; fails with its last output."""

    def run(script: str, n_ranks: int, job: dict[str, object]) -> None:
        path = tmp_path / f"{script}-{n_ranks}.json"
        path.write_text(json.dumps(job))
        here = Path(__file__)
        words = [*launch.launch_command(n_ranks), str(here.with_name(script)), str(path)]
        done = subprocess.run(
            words,
            env=launch.build_environment(TrainConfig(), "-")
            | {"PYTHONPATH": f"{here.parent}:{here.parents[2]}"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    return run
