"""The trainer service as a whole: real ranks, called by its client."""

import asyncio
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollmill.tasks.errors import (
    BatchRefusedError,
    RequestError,
    ServiceDiedError,
    ServiceStartError,
    ShardError,
    StoreError,
    SyncError,
)
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_messages import SendTarget
from rollmill.tasks.train.config import TrainConfig, settings_by_step, with_settings
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import (
    AwaitCheckpoint,
    BeginCheckpoint,
    ExportPolicy,
    LoadPolicy,
    TrainStep,
)
from rollmill.tasks.train.service.trainer_client import TrainerClient

pytestmark = pytest.mark.service

END_S = 60.0
DEEP_IN_A_STEP_S = 1.0
"""CPU seconds of a rank after which it has read its rows, and computes."""

Receive = Callable[..., dict[str, torch.Tensor]]


class RunTrainer(Protocol):
    def __call__(
        self, config: TrainConfig, sync: SyncConfig | None = None
    ) -> AbstractAsyncContextManager[Any]: ...


async def load(client: TrainerClient, model: Path, run: Path, version: int = 0, incarnation: int = 1) -> None:
    checkpoint = str(run / "checkpoints" / f"version={version:06d}") if version else None
    await client.do(
        LoadPolicy(
            run_id="r",
            incarnation=incarnation,
            model=str(model),
            folder=str(run),
            checkpoint=checkpoint,
            version=version,
        )
    )


async def exported(client: TrainerClient, folder: Path) -> bytes:
    await client.do(ExportPolicy(path=str(folder)))
    return (folder / "model.safetensors").read_bytes()


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def without_times(result: StepResult) -> list[object]:
    measured = ("_s", "_ms", "rss_bytes", "slowest_rank", "control_stalls")
    metrics = [metric for metric in result.metrics if not metric.name.endswith(measured)]
    return [dataclasses.replace(result, metrics=[], duration_s=0.0), *metrics]


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("ranks", "zero_stage"),
    [
        (2, 3),
        *[
            pytest.param(ranks, stage, marks=pytest.mark.long)
            for ranks, stage in [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2)]
        ],
    ],
)
async def test_resumed_trainer_reaches_the_same_bytes(
    ranks: int, zero_stage: int, tiny_model: Path, batches: Any, run_trainer: RunTrainer, tmp_path: Path
) -> None:
    config, run = TrainConfig(ranks=ranks, zero_stage=zero_stage, micro_batch_tokens=512), tmp_path / "run"
    digests = [batches.write_step(run, step, batches.uneven_rows(16, seed=step)) for step in range(4)]

    async def train(client: TrainerClient, step: int) -> StepResult:
        return await client.do(TrainStep(folder=str(run), run_id="r", step=step, digest=digests[step]))

    async with run_trainer(config) as (client, _):
        await load(client, tiny_model, run)
        results = [await train(client, step) for step in range(2)]
        assert (await client.do(BeginCheckpoint(folder=str(run), version=2))).is_new
        results += [await train(client, step) for step in range(2, 4)]
        assert (await client.do(AwaitCheckpoint(version=2))).n_bytes > 0
        straight = await exported(client, tmp_path / "straight")

    async with run_trainer(config) as (client, _):
        await load(client, tiny_model, run, version=2, incarnation=2)
        at_checkpoint = await exported(client, tmp_path / "checkpoint")
        assert await train(client, 1) == results[1], (
            "the applied batch's result is stored with the checkpoint"
        )
        again = [await train(client, step) for step in range(2, 4)]
        resumed = await exported(client, tmp_path / "resumed")
        await load(client, tiny_model, run, version=2, incarnation=3)
        loaded_again = await exported(client, tmp_path / "again")
        flip_a_byte(
            max((run / "checkpoints/version=000002").rglob("*.*"), key=lambda each: each.stat().st_size)
        )
        with pytest.raises(StoreError, match="version=000002"):
            await load(client, tiny_model, run, version=2, incarnation=4)

    assert resumed == straight
    assert loaded_again == at_checkpoint != straight
    assert [without_times(each) for each in again] == [without_times(each) for each in results[2:]]
    assert [each.version for each in results] == [1, 2, 3, 4]


BEFORE = {"train.lr": 1e-3, "train.warmup_steps": 0}
AFTER = BEFORE | {
    "train.loss": "reinforce",
    "train.lr": 2e-2,
    "train.betas": [0.8, 0.9],
    "train.weight_decay": 0.3,
    "train.weight_decay_on": "matrices",
    "train.max_grad_norm": 1e-3,
    "train.normalization": "sequence",
    "train.entropy_coef": 0.1,
    "train.epochs": 2,
}


@pytest.mark.parametrize(
    ("ranks", "zero_stage"),
    [(2, 3), *[pytest.param(ranks, stage, marks=pytest.mark.long) for ranks, stage in [(1, 0), (2, 1)]]],
)
async def test_a_step_is_trained_under_the_settings_that_it_is_sent_with(
    ranks: int, zero_stage: int, tiny_model: Path, batches: Any, run_trainer: RunTrainer, tmp_path: Path
) -> None:
    other, run = {"lr": 0.5, "max_grad_norm": 7.0, "clip_high": 0.9, "epochs": 3}, tmp_path / "run"
    digests = [batches.write_step(run, step, batches.uneven_rows(8, seed=step)) for step in range(2)]
    plain = TrainConfig(ranks=ranks, zero_stage=zero_stage, micro_batch_tokens=512)

    async def train(client: TrainerClient, step: int, settings: dict[str, Any]) -> StepResult:
        command = TrainStep(folder=str(run), run_id="r", step=step, digest=digests[step], settings=settings)
        return await client.do(command)

    whole = settings_by_step(plain)
    async with run_trainer(TrainConfig(**plain.model_dump() | other)) as (client, _):
        await load(client, tiny_model, run)
        results = [await train(client, 0, whole | BEFORE)]
        with pytest.raises(RequestError, match=r"train\.dtype = 'bfloat16': no setting of this name"):
            await train(client, 1, {"train.dtype": "bfloat16"})
        with pytest.raises(RequestError, match=r"train\.loss = 'nothing'"):
            await train(client, 1, whole | {"train.loss": "nothing"})
        results.append(await train(client, 1, whole | AFTER))
        switched = await exported(client, tmp_path / "switched")

    for step, settings in enumerate((BEFORE, AFTER)):
        async with run_trainer(with_settings(plain, settings)) as (client, _):
            await load(client, tiny_model, run, version=step, incarnation=step + 1)
            assert without_times(await train(client, step, {})) == without_times(results[step])
            await client.do(BeginCheckpoint(folder=str(run), version=step + 1))
            await client.do(AwaitCheckpoint(version=step + 1))
            last = await exported(client, tmp_path / f"started-with-{step}")
    assert switched == last


async def check_weights_arrive(client: TrainerClient, receive: Receive, tmp_path: Path) -> None:
    """What a receiver gets is what is exported."""
    offer = await client.offer()
    receiving = asyncio.create_task(asyncio.to_thread(receive, offer, "first"))
    (sent,) = await client.send([SendTarget("server", "tcp", "first")])
    arrived = await receiving
    assert (sent.server, sent.error) == ("server", "")
    await client.do(ExportPolicy(path=str(tmp_path / "exported")))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert sent.bytes == sum(each.nbytes for each in exported.values())
    assert arrived.keys() == exported.keys()
    assert all(torch.equal(arrived[name], exported[name]) for name in exported)


async def test_a_batch_is_applied_once_and_anything_else_is_refused(
    tiny_model: Path, batches: Any, run_trainer: RunTrainer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    digests = [batches.write_step(run, step, batches.uneven_rows(6, seed=step)) for step in range(3)]
    too_long = batches.write_step(tmp_path / "long", 1, [batches.row(4, 5, 1.0), batches.row(500, 40, 1.0)])

    async with run_trainer(TrainConfig(micro_batch_tokens=512)) as (client, process):

        async def train(step: int, digest: str, run_id: str = "r", folder: Path = run) -> StepResult:
            return await client.do(TrainStep(folder=str(folder), run_id=run_id, step=step, digest=digest))

        with pytest.raises(ServiceDiedError, match="no policy loaded"):
            await train(0, digests[0])
        with pytest.raises(RequestError, match="no model folder"):
            await load(client, tmp_path / "nowhere", run)
        with pytest.raises(StoreError, match="not complete"):
            await load(client, tiny_model, run, version=7)
        await load(client, tiny_model, run)
        first, at_the_same_time = await asyncio.gather(train(0, digests[0]), train(0, digests[0]))
        assert first == at_the_same_time == await train(0, digests[0])
        weights = await exported(client, tmp_path / "after-step-0")

        for step, digest, run_id in [(0, digests[1], "r"), (2, digests[2], "r"), (1, digests[1], "other")]:
            with pytest.raises(
                BatchRefusedError, match=f"is at step 1 of run r, after the batch {digests[0]}"
            ):
                await train(step, digest, run_id)
        with pytest.raises(
            BatchRefusedError, match=f"stored batch is {digests[1]}, requested was {digests[2]}"
        ):
            await train(1, digests[2])
        with pytest.raises(
            BatchRefusedError, match=r"r-1-1: it has 540 tokens, and train\.micro_batch_tokens is 512"
        ):
            await train(1, too_long, folder=tmp_path / "long")
        (shard,) = (run / "rollouts" / "step=000001").glob("*.arrow")
        shard.write_bytes(b"torn")
        with pytest.raises(ShardError, match="is damaged"):
            await train(1, digests[1])

        assert await exported(client, tmp_path / "after-refusals") == weights
        batches.write_step(run, 1, batches.uneven_rows(6, seed=1))
        assert (await train(1, digests[1])).version == 2
        with pytest.raises(RequestError, match="is at version 2, not 1"):
            await client.do(BeginCheckpoint(folder=str(run), version=1))
        health = await client.health()
        assert (health.run, health.incarnation, health.version, health.digest) == ("r", 1, 2, digests[1])
        with pytest.raises(RequestError, match="401"):
            await TrainerClient(client.url, "guess", timeout_s=10.0).health()
        await client.shutdown()
        assert await asyncio.wait_for(process.wait(), END_S) == 0


async def test_weights_arrive_from_partitioned_ranks_and_steps_without_update_keep_them(
    tiny_model: Path, batches: Any, run_trainer: RunTrainer, receive_weights: Receive, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    rows = [
        [],
        [batches.row(4, 6, 0.0), batches.row(4, 3, 0.0)],
        [batches.row(4, 0, 1.0)],
        [batches.row(4, 6, 3e38), batches.row(4, 3, -3e38)],
        batches.uneven_rows(6),
    ]
    digests = [batches.write_step(run, step, each) for step, each in enumerate(rows)]

    async with run_trainer(TrainConfig(ranks=2, zero_stage=3), heartbeat_timeout_s=5.0) as (client, _):
        await load(client, tiny_model, run)
        await check_weights_arrive(client, receive_weights, tmp_path)
        before = await exported(client, tmp_path / "before")
        results = [
            await client.do(TrainStep(folder=str(run), run_id="r", step=step, digest=digests[step]))
            for step in range(4)
        ]
        assert await exported(client, tmp_path / "after") == before
        await asyncio.sleep(2 * 5.0)  # idle for several heartbeats' time
        assert max((await client.health()).heartbeats) < 5.0
        last = await client.do(TrainStep(folder=str(run), run_id="r", step=4, digest=digests[4]))
        assert last.updated
        assert await exported(client, tmp_path / "trained") != before

    assert [(each.version, each.updated) for each in results] == [
        (1, False),
        (2, False),
        (3, False),
        (4, False),
    ]
    assert [each.reason for each in results] == [
        "empty batch",
        "no spread",
        "empty batch",
        "non-finite loss",
    ]
    dropped = [
        {metric.name: metric.value for metric in each.metrics}["train/dropped_tokens"] for each in results
    ]
    assert dropped == [0.0, 9.0, 0.0, 0.0]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
async def test_service_ends_and_client_says_why_when_a_rank_is_killed(
    victim: int, tiny_model: Path, batches: Any, run_trainer: RunTrainer, rank_pids: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    digest = batches.write_step(run, 0, batches.uneven_rows(4000))

    async with run_trainer(TrainConfig(ranks=2, micro_batch_tokens=256)) as (client, process):
        await load(client, tiny_model, run)
        ranks = rank_pids(process)
        before = {rank: cpu_s(pid) for rank, pid in ranks.items()}
        training = asyncio.create_task(
            client.do(TrainStep(folder=str(run), run_id="r", step=0, digest=digest))
        )
        while any(cpu_s(pid) < before[rank] + DEEP_IN_A_STEP_S for rank, pid in ranks.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # a rank that waits for the other one would report a broken connection
        assert not training.done()
        os.kill(ranks[victim], signal.SIGKILL)
        with pytest.raises(ServiceDiedError, match="SIGKILL"):
            await asyncio.wait_for(training, END_S)
        assert await asyncio.wait_for(process.wait(), END_S) != 0
        assert rank_pids(process) == {}


@pytest.fixture(scope="session")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 MB, which no socket takes in before somebody reads it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "larger"
    config = Qwen2Config(
        vocab_size=57,
        hidden_size=512,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


async def test_a_rank_killed_while_sending_ends_the_service_and_all_receptions(
    larger_model: Path, run_trainer: RunTrainer, receive_weights: Receive, rank_pids: Any, tmp_path: Path
) -> None:
    may_begin, reports = threading.Event(), asyncio.Queue[dict[str, int]]()
    config, sync = TrainConfig(ranks=2, zero_stage=3), SyncConfig(stall_timeout_s=END_S)
    async with run_trainer(config, sync, bucket_bytes=1 << 20, progress_interval_s=0.2) as (client, process):
        await load(client, larger_model, tmp_path / "run")
        offer = await client.offer()
        receiving = asyncio.create_task(asyncio.to_thread(receive_weights, offer, "held", may_begin))
        targets = [SendTarget("server", "tcp", "held")]
        sending = asyncio.create_task(client.send(targets, reports.put_nowait, every_s=0.2))
        n_bytes = 0
        while not n_bytes:
            n_bytes = (await asyncio.wait_for(reports.get(), END_S)).get("server", 0)
        assert n_bytes < offer.plan.total_bytes, "it is in the middle of the transfer"
        os.kill(rank_pids(process)[1], signal.SIGKILL)
        with pytest.raises(ServiceDiedError, match="SIGKILL"):
            await asyncio.wait_for(sending, END_S)
        may_begin.set()
        with pytest.raises(SyncError, match="did not arrive"):
            await asyncio.wait_for(receiving, END_S)
        assert await asyncio.wait_for(process.wait(), END_S) != 0
        assert rank_pids(process) == {}


async def test_the_transfer_to_a_server_that_refuses_ends_on_all_ranks(
    tiny_model: Path, run_trainer: RunTrainer, receive_weights: Receive, tmp_path: Path
) -> None:
    refusing = SendTarget("refusing", "tcp", "refused")
    async with run_trainer(TrainConfig(ranks=2), SyncConfig(timeout_s=10 * END_S)) as (client, _):
        await load(client, tiny_model, tmp_path / "run")
        offer = await client.offer()
        receiving = asyncio.create_task(asyncio.to_thread(receive_weights, offer, "good"))
        sending = asyncio.create_task(client.send([refusing, SendTarget("good", "tcp", "good")]))
        await receiving
        await client.stop_sending(refusing)
        lost, sent = await asyncio.wait_for(sending, END_S)
        assert lost.error.startswith("rank 0: the server refused the weights")
        assert (sent.bytes, sent.error) == (offer.plan.total_bytes, "")


async def test_service_ends_when_a_rank_falls_silent(
    tiny_model: Path, batches: Any, run_trainer: RunTrainer, rank_pids: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    digest = batches.write_step(run, 0, batches.uneven_rows(6))

    async with run_trainer(TrainConfig(ranks=2), heartbeat_timeout_s=6.0) as (client, process):
        await load(client, tiny_model, run)
        os.kill(rank_pids(process)[1], signal.SIGSTOP)
        with pytest.raises(ServiceDiedError, match="rank 1 has been silent"):
            await asyncio.wait_for(
                client.do(TrainStep(folder=str(run), run_id="r", step=0, digest=digest)), 2 * END_S
            )


async def test_an_error_in_a_rank_ends_the_service_with_its_traceback(
    tiny_model: Path, run_trainer: RunTrainer, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny_model / "config.json").read_text())

    async with run_trainer(TrainConfig()) as (client, process):
        with pytest.raises(ServiceDiedError, match="OSError"):
            await load(client, broken, tmp_path / "run")
        assert await asyncio.wait_for(process.wait(), END_S) != 0


async def test_a_taken_port_is_reported_at_the_start(run_trainer: RunTrainer) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ServiceStartError, match="Address already in use"),
    ):
        async with run_trainer(TrainConfig(), port=taken.getsockname()[1]):
            pass
