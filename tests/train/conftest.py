"""A tiny model, batches in a run's folder, and a trainer service that is kept for the module."""

import json
import secrets
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from tasks.serve.process import LaunchedProcess, free_port
from tasks.store.digest import batch_digest
from tasks.store.layout import RunFolder
from tasks.store.names import ShardName
from tasks.store.schemas import batch_of, ragged, schema_of
from tasks.sync.config import SyncConfig
from tasks.sync.order import WeightOffer
from tasks.train import launch
from tasks.train.client import TrainerClient
from tasks.train.config import TrainConfig

VOCABULARY = 57
RECEIVE_S = 60.0
EMPTY_TEXT = ("example_id", "example", "error_type", "error", "messages", "server")


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
) -> Callable[[TrainConfig], AbstractAsyncContextManager[RunningTrainer]]:
    """Launch a trainer service, and end it afterwards."""

    @asynccontextmanager
    async def running(config: TrainConfig) -> AsyncIterator[RunningTrainer]:
        port, token = config.port or free_port(), secrets.token_hex(8)
        path = launch.write_config(config, SyncConfig(), port, tmp_path / "logs")
        process = LaunchedProcess.start(
            "trainer",
            launch.command(config, path),
            log=tmp_path / "logs" / "trainer.log",
            env=launch.environment(config, token),
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
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _is_below(int(folder.name), process.pid):
            words = (folder / "environ").read_bytes().split(b"\0")
            ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
            found |= dict.fromkeys(ranks, int(folder.name))
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
def receive_weights() -> Callable[[WeightOffer, str], dict[str, Any]]:
    """Take what a trainer sends to the only worker of a server, as a server's worker does."""
    import torch

    from tasks.sync.buckets import TransferPlan
    from tasks.sync.link import RECEIVER, join_store, link_name, open_link
    from tasks.sync.receiver import arriving

    def receive(offer: WeightOffer, prefix: str) -> dict[str, torch.Tensor]:
        plan, store = TransferPlan.from_json(**offer.plan), join_store(offer.host, offer.port, RECEIVE_S)
        links = [
            open_link(store, link_name(prefix, rank, 0), RECEIVER, offer.host, RECEIVE_S)
            for rank in range(len(plan.senders))
        ]
        return dict(arriving(links, plan, torch.empty(plan.total_bytes, dtype=torch.uint8)))

    return receive


class Row(NamedTuple):
    """A trajectory of `n_prompt` prompt tokens and `n_completion` sampled ones."""

    n_prompt: int
    n_completion: int
    advantage: float
    env: str = "addition"
    temperature: float = 1.0


def uneven_rows(n_rows: int, seed: int = 0) -> list[Row]:
    """Rows whose lengths differ by a factor of twenty, one of them without a sampled token."""
    rng = np.random.default_rng(seed)
    rows = [
        Row(
            n_prompt=int(rng.choice([2, 8, 30, 120])),
            n_completion=int(rng.choice([1, 2, 5, 40, 90])),
            advantage=float(rng.normal()),
            env=["addition", "countdown"][int(rng.integers(2))],
            temperature=float(rng.choice([0.7, 1.0, 1.3])),
        )
        for _ in range(n_rows - 1)
    ]
    return [*rows, Row(5, 0, 1.0)]


def write_step(
    folder: Path,
    step: int,
    rows: list[Row],
    *,
    run: str = "r",
    seed: int = 0,
    token_ids: list[np.ndarray] | None = None,
) -> str:
    """Store rollouts and batch of a step, of random tokens where none are given; returns the batch's digest."""
    rng = np.random.default_rng([seed, step])
    lengths = [row.n_prompt + row.n_completion for row in rows]
    masks = [np.arange(length) >= row.n_prompt for length, row in zip(lengths, rows, strict=True)]
    kind = schema_of("rollouts")
    columns: dict[str, object] = {
        name: [0] * len(rows) if not pa.types.is_large_list(kind.field(name).type) else [[]] * len(rows)
        for name in kind.names
    }
    columns |= dict.fromkeys(EMPTY_TEXT, [""] * len(rows))
    columns |= {
        "run": [run] * len(rows),
        "step": [step] * len(rows),
        "trajectory_id": [f"{run}-{step}-{i}" for i in range(len(rows))],
        "env": [row.env for row in rows],
        "temperature": [row.temperature for row in rows],
        "status": ["complete"] * len(rows),
        "finish_reason": ["stop"] * len(rows),
        "outcome": ["{}"] * len(rows),
        "token_ids": ragged(
            token_ids or [rng.integers(2, VOCABULARY, n) for n in lengths], kind.field("token_ids").type
        ),
        "loss_mask": ragged(masks, kind.field("loss_mask").type),
        "logprobs": ragged(
            [np.where(mask, rng.normal(-4.0, 0.3, len(mask)), np.nan) for mask in masks],
            kind.field("logprobs").type,
        ),
    }
    rollouts = batch_of("rollouts", columns)
    batch = batch_of(
        "batches",
        {
            "run": [run] * len(rows),
            "step": [step] * len(rows),
            "order": list(range(len(rows))),
            "trajectory_id": columns["trajectory_id"],
            "group": [0] * len(rows),
            "sample": list(range(len(rows))),
            "env": columns["env"],
            "advantage": [row.advantage for row in rows],
            "reward": [0.0] * len(rows),
            "source": [""] * len(rows),
            "source_step": [step] * len(rows),
            "scorer": ["addition@1"] * len(rows),
        },
    )
    write_shard(folder, "rollouts", step, rollouts)
    write_shard(folder, "batches", step, batch)
    return batch_digest(pa.Table.from_batches([batch]))


def write_shard(folder: Path, dataset: str, step: int, rows: pa.RecordBatch) -> None:
    target = Path(RunFolder(folder).dataset(dataset, step=step))
    target.mkdir(parents=True, exist_ok=True)
    with (
        pa.OSFile(str(target / str(ShardName(1, 1))), "wb") as file,
        pa.ipc.new_file(file, rows.schema) as writer,
    ):
        writer.write_batch(rows)


class Batches(NamedTuple):
    """What tests need of the functions above."""

    row: type[Row]
    uneven_rows: Callable[..., list[Row]]
    write_step: Callable[..., str]
    write_shard: Callable[..., None]


@pytest.fixture(scope="session")
def batches() -> Batches:
    return Batches(Row, uneven_rows, write_step, write_shard)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[[str, int, dict[str, object]], None]:
    """Run a script beside this file on ranks that torchrun starts; fails with its last output."""

    def run(script: str, n_ranks: int, job: dict[str, object]) -> None:
        path = tmp_path / f"{script}-{n_ranks}.json"
        path.write_text(json.dumps(job))
        words = [*launch.torchrun(n_ranks), str(Path(__file__).with_name(script)), str(path)]
        done = subprocess.run(
            words,
            env=launch.environment(TrainConfig(), "-"),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    return run
