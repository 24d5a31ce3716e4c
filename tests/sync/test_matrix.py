"""Weights from a real trainer to a real vLLM server under load: transports, modes, models, ZeRO stages, ranks."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest
from stored_step import uneven_rows, write_step

from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import Broadcast, create_prefix, find_route
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_parity import compare_checksums
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service import launch
from rollmill.tasks.train.service.commands import DigestWeights, LoadPolicy, TrainStep, WriteWeights
from rollmill.tasks.train.service.trainer_client import TrainerClient
from tests.stubs.parity import FLOAT32_NATS, largest_difference

START_S = 300.0
SYNC = SyncConfig(timeout_s=60.0)


class Case(NamedTuple):
    ranks: int
    model: str
    zero_stage: int
    transport: str
    mode: str

    def __str__(self) -> str:
        return f"{self.model}-zero{self.zero_stage}-{self.ranks}-{self.transport}-{self.mode}"


AXES = (
    (1, 2),
    ("dense", "tied", "experts"),
    (0, 1, 2, 3),
    ("tcp", "shm", "files"),
    ("keep", "second_copy"),
)
PAIRWISE = [
    Case(1, "dense", 0, "files", "second_copy"),
    Case(1, "dense", 1, "shm", "second_copy"),
    Case(1, "dense", 2, "tcp", "second_copy"),
    Case(1, "experts", 1, "tcp", "keep"),
    Case(1, "experts", 3, "shm", "keep"),
    Case(1, "tied", 0, "tcp", "keep"),
    Case(1, "tied", 3, "tcp", "keep"),
    Case(2, "dense", 3, "files", "keep"),
    Case(2, "dense", 3, "tcp", "second_copy"),
    Case(2, "experts", 0, "shm", "second_copy"),
    Case(2, "experts", 2, "files", "keep"),
    Case(2, "tied", 1, "files", "keep"),
    Case(2, "tied", 1, "tcp", "second_copy"),
    Case(2, "tied", 2, "shm", "keep"),
]
OTHERS = [case for values in product(*AXES) if (case := Case(*values)) not in PAIRWISE]


def pairs(case: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return set(combinations(enumerate(case), 2))


def test_every_pair_of_values_occurs_in_a_case_that_is_always_run() -> None:
    assert set().union(*map(pairs, product(*AXES))) <= set().union(*map(pairs, PAIRWISE))


class Trainer(NamedTuple):
    """A running trainer service that loads `stages`/STAGE/MODEL at a ZeRO stage."""

    url: str
    token: str


@pytest.fixture(scope="module")
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    config = TrainConfig(ranks=request.param, lr=0.02, warmup_steps=0, micro_batch_tokens=512)
    port, token, logs = free_port(), secrets.token_hex(8), tmp_path_factory.mktemp("trainer")
    script = Path(__file__).with_name("staged_trainer.py")
    process = LaunchedProcess.start(
        "trainer",
        [
            *launch.launch_command(config.ranks),
            str(script),
            str(launch.write_config(config, SYNC, port, logs, bucket_bytes=1 << 20)),
        ],
        log=logs / "trainer.log",
        env=launch.build_environment(config, token),
        stop_grace_s=2.0,
    )
    try:
        yield Trainer(f"http://127.0.0.1:{port}", token)
    finally:
        process.stop_now()


@pytest.fixture(scope="module")
def dense_server(
    run_server: Callable[[Path], AbstractContextManager[Any]], save_tiny: Callable[..., Path]
) -> Iterator[Any]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with run_server(save_tiny(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=False)) as served:
        yield served


SERVERS = {"dense": "dense_server", "tied": "vllm_server", "experts": "expert_server"}


@pytest.fixture
def served(case: Case, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(SERVERS[case.model])


@pytest.fixture
async def client(served: Any, use_repairs: Any) -> AsyncIterator[VllmClient]:
    async with VllmClient(served.url, served.config) as client:
        await use_repairs(client)
        yield client


@pytest.fixture
async def source(trainer: Trainer) -> AsyncIterator[TrainerClient]:
    async with TrainerClient(trainer.url, trainer.token, timeout_s=START_S) as client:
        await client.wait_until_healthy(START_S)
        yield client


async def load(trainer: TrainerClient, model: Path, stage: int, place: Path) -> None:
    """Load version 0 of a run in `place`, at a ZeRO stage."""
    (place / str(stage)).symlink_to(model)
    await trainer.do(
        LoadPolicy(
            run_id="r",
            incarnation=1,
            model=str(place / str(stage)),
            folder=str(place),
            checkpoint=None,
            version=0,
        )
    )


async def give(
    source: TrainerClient, client: VllmClient, version: str, sync: SyncConfig, prefix: str
) -> None:
    """Have the server take the trainer's weights, and compare every tensor as it arrived."""
    offer = await source.offer()
    route, _ = await find_route(client, offer, sync)
    files = (
        await source.do(WriteWeights(folder=sync.folder, version=int(version[-1])))
        if sync.transport == "files"
        else ()
    )
    routes, names = {client: replace(route, prefix=prefix)}, [each.name for each in offer.plan.tensors]
    broadcast = Broadcast(source, offer, routes, version, sync, names, files)
    async with asyncio.TaskGroup() as both:
        sending, taking = (
            both.create_task(broadcast.send()),
            both.create_task(broadcast.update_server(client)),
        )
    assert not any(each.error for each in sending.result())
    compare_checksums(client.url, version, await source.do(DigestWeights()), taking.result().checksums)


@pytest.mark.service
@pytest.mark.parametrize(
    ("trainer", "case"),
    [
        pytest.param(case.ranks, case, id=str(case), marks=[pytest.mark.long] if case in OTHERS else [])
        for case in sorted([*PAIRWISE, *OTHERS])
    ],
    indirect=["trainer"],
    scope="module",
)
async def test_a_server_under_load_computes_as_its_trainer(
    case: Case,
    source: TrainerClient,
    client: VllmClient,
    served: Any,
    sequences: Any,
    under_load: Any,
    record_property: Callable[[str, object], None],
    tmp_path: Path,
) -> None:
    prefix = create_prefix()
    how = {"transport": case.transport, "mode": case.mode, "folder": str(tmp_path / "weights")}
    sync = SYNC.model_copy(update=how)
    await load(source, served.model, case.zero_stage, tmp_path)
    await give(source, client, "r:1:0", sync, prefix)
    assert await largest_difference(source, client, sequences, "r:1:0") <= FLOAT32_NATS

    seed = crc32(str(case).encode())
    digest = write_step(tmp_path, 0, uneven_rows(6, seed=seed), seed=seed)
    assert (await source.do(TrainStep(folder=str(tmp_path), run_id="r", step=0, digest=digest))).updated
    assert await largest_difference(source, client, sequences, "r:1:1") > FLOAT32_NATS

    async with under_load(client, sequences[1]) as completions:
        await give(source, client, "r:1:1", sync, prefix)
    spans = [[version for _, version in each.version_spans] for each in completions]
    assert ["r:1:0", "r:1:1"] in spans
    difference = await largest_difference(source, client, sequences, "r:1:1")
    assert difference <= FLOAT32_NATS
    record_property("difference_nats", difference)
