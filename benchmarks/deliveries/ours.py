"""Our way: each row goes to the run's writer as it comes; a trainer rank maps what it needs."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path

from benchmarks.deliveries.requests import N_ROWS, PROMPT, TIMEOUT_S, each_completion
from rollmill.tasks.rollout.admission import Admission
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.completions import PoolSampler
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Example
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.rollout.episode import EpisodePlayer
from rollmill.tasks.rollout.task import StepSampler
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryBuilder, TrajectoryRequest
from rollmill.tasks.serve.responses import Completion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.expert_routing import read_routing
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.writer import RunWriter
from rollmill.tasks.train.samples import check_samples, read_samples

RUN, STEP, FLUSH_S = "run", 0, 0.02
IDS = [f"{RUN}.{number}.0.0" for number in range(N_ROWS)]


def player_of(place: Path) -> EpisodePlayer:
    """The player of a run; its requests are sent by `requests`, so it lends its environment alone."""
    tokenizer = ChatTokenizer.load(save_character_tokenizer(place / "model"))
    sampler = PoolSampler(ServerPool(), RolloutConfig(), RUN, TIMEOUT_S)
    return EpisodePlayer(Addition(), tokenizer, sampler, max_tokens=1 << 15, timeout_s=TIMEOUT_S)


async def deliver(client: VllmClient, player: EpisodePlayer, folder: RunFolder) -> None:
    """Store all rows with their routed experts."""
    async with RunWriter(open_files(folder), 1, FLUSH_S) as writer:

        def keep(rows: Rows) -> Awaitable[None]:
            return writer.append("rollouts", rows, step=STEP)

        def keep_beside(dataset: str, rows: Rows) -> Awaitable[None]:
            return writer.append(dataset, rows, step=STEP)

        sampler = StepSampler(player, Admission(1), RUN, STEP, keep, keep_beside, keeps_routing=True)
        acknowledgements: list[Awaitable[None]] = []

        async def store(number: int, completion: Completion) -> None:
            await sampler.store(_trajectory(number, completion), acknowledgements)

        with writer.expect_rows():
            await each_completion(client, store)
        await asyncio.gather(*acknowledgements)


async def store_batch(folder: RunFolder, env: str) -> None:
    """The `batches` rows by which a trainer rank finds the delivered rollouts."""
    columns: dict[str, object] = {
        "run": [RUN] * N_ROWS,
        "step": [STEP] * N_ROWS,
        "order": list(range(N_ROWS)),
        "trajectory_id": IDS,
        "group": list(range(N_ROWS)),
        "sample": [0] * N_ROWS,
        "env": [env] * N_ROWS,
        "advantage": [1.0] * N_ROWS,
        "token_advantages": [[]] * N_ROWS,
        "reward": [1.0] * N_ROWS,
        "source": [""] * N_ROWS,
        "source_step": [STEP] * N_ROWS,
        "scorer": ["none@1"] * N_ROWS,
    }
    async with RunWriter(open_files(folder), 2, 0.0) as writer:
        await writer.append("batches", make_batch("batches", columns), step=STEP)


def read_back(folder: RunFolder) -> dict[str, float]:
    """Seconds of one column, of a trainer rank's samples, checked, and of the routed experts of all rows."""
    read(folder, "rollouts", ["step"], step=STEP)
    started = time.perf_counter()
    column = read(folder, "rollouts", ["logprobs"], step=STEP)["logprobs"]
    column_at = time.perf_counter()
    _, samples = read_samples(folder.absolute, STEP)
    check_samples(samples)
    samples_at = time.perf_counter()
    experts = read_routing(folder, STEP, samples.trajectory_ids)
    experts_at = time.perf_counter()
    assert len(column) == len(samples.token_ids) == N_ROWS
    assert all(len(each) == len(ids) - 1 for each, ids in zip(experts, samples.token_ids, strict=True))
    return {
        "read_column_s": column_at - started,
        "read_samples_s": samples_at - column_at,
        "read_routing_s": experts_at - samples_at,
    }


def _trajectory(number: int, completion: Completion) -> Trajectory:
    draft = TrajectoryBuilder(
        TrajectoryRequest(IDS[number], number, 0, 0, Example("0", {"answer": "85"}), number, 1.0)
    )
    draft.add_context(PROMPT)
    spans = [(start, 0) for start, _ in completion.version_spans]
    draft.add_completion(completion.token_ids, completion.logprobs, spans, completion.finish_reason)
    assert completion.routed_experts is not None
    draft.add_routing(completion.routed_experts)
    return draft.build("complete")
