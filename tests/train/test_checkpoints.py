"""A stored state is the same on any number of ranks and under every ZeRO stage, bit for bit."""

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import StoredFile
from rollmill.tasks.store.folders import RunFolder, checkpoint_key
from rollmill.tasks.store.run.resume import find_resume_point, list_complete_checkpoints
from rollmill.tasks.train.checkpoints.checkpoint_writer import CheckpointWriter, Writing
from rollmill.tasks.train.checkpoints.hf_export import ExportConfig
from rollmill.tasks.train.checkpoints.state_files import StateFiles
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service.commands import (
    AwaitCheckpoint,
    BeginCheckpoint,
    DigestState,
    ExportPolicy,
    LoadPolicy,
    TrainStep,
)
from rollmill.tasks.train.service.trainer_client import TrainerClient

STEPS = 6

RunRanks = Callable[[str, int, dict[str, object]], None]
STAGES = [("float32", stage) for stage in range(4)] + [("bfloat16", stage) for stage in (1, 2, 3)]


def name_of(dtype: str, stage: int) -> str:
    return f"{dtype}-{stage}"


class Place:
    """Jobs of one number of ranks, and the digests that they give."""

    def __init__(self, folder: Path, model: Path, run_ranks: RunRanks) -> None:
        self.folder, self._model, self._run_ranks = folder, model, run_ranks

    def run(self, ranks: int, steps: list[dict[str, Any]]) -> list[dict[str, str]]:
        paths = [self.folder / f"digests-{number}.json" for number in range(len(steps))]
        numbered = [step | {"digests": str(path)} for step, path in zip(steps, paths, strict=True)]
        self._run_ranks("checkpoint_ranks.py", ranks, {"model": str(self._model), "steps": numbered})
        return [json.loads(path.read_text()) for path in paths]

    def step(
        self,
        dtype: str,
        stage: int,
        ranks: int,
        *,
        load: str = "",
        save: str = "",
        first: int = 0,
        updates: int = 2,
    ) -> dict[str, Any]:
        return {
            "config": {"ranks": ranks, "zero_stage": stage, "dtype": dtype, "max_grad_norm": 1.0},
            "load": str(self.folder / load) if load else "",
            "save": str(self.folder / save) if save else "",
            "first": first,
            "updates": updates,
        }


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, run_ranks: RunRanks) -> Place:
    return Place(tmp_path, tiny_model, run_ranks)


@pytest.mark.service
@pytest.mark.parametrize("kinds", [pytest.param(STAGES, marks=pytest.mark.long), [("bfloat16", 3)]])
def test_a_restored_state_continues_bit_for_bit_and_is_the_same_on_other_ranks_and_stages(
    kinds: list[tuple[str, int]], place: Place
) -> None:
    saves = [place.step(*kind, 2, save=f"{name_of(*kind)}-{n}", updates=n) for kind in kinds for n in (2, 4)]
    loads = [place.step(*kind, 2, load=f"{name_of(*kind)}-2", first=2) for kind in kinds]
    on_two = place.run(2, saves + loads)
    after_2, after_4, continued = on_two[: len(saves) : 2], on_two[1 : len(saves) : 2], on_two[len(saves) :]
    assert continued == after_4 != after_2

    elsewhere = [
        place.step(*other, 1, load=f"{name_of(*kind)}-2", save=f"{name_of(*kind)}-on-1", updates=0)
        for kind, other in of_one_dtype(kinds)
    ]
    for step, found in zip(elsewhere, place.run(1, elsewhere), strict=True):
        assert found == after_2[[f"{name_of(*kind)}-2" for kind in kinds].index(Path(step["load"]).name)]

    back = [place.step(*kind, 2, load=f"{name_of(*kind)}-on-1", first=2) for kind in kinds]
    assert place.run(2, back) == after_4


def of_one_dtype(kinds: list[tuple[str, int]]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Every stored kind with every stage that it may be loaded under."""
    return [(kind, other) for kind in kinds for other in STAGES if other[0] == kind[0]]


def test_files_that_lack_numbers_are_refused(tmp_path: Path) -> None:
    with (
        StateFiles(tmp_path) as files,
        pytest.raises(StoreError, match="has 0 of the 3 numbers of weight/a from 1 on"),
    ):
        files.read("weight", "a", 1, 3)


@pytest.mark.service
async def test_a_killed_and_resumed_trainer_ends_with_the_same_weights_also_with_fewer_ranks(
    tiny_model: Path, batches: Any, run_trainer: Any, rank_pids: Any, tmp_path: Path
) -> None:
    """Killed while a checkpoint is being written; then its run is resumed, by two ranks and by one."""
    config = TrainConfig(ranks=2, zero_stage=2, micro_batch_tokens=512, lr=1e-3)
    whole, killed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    for run in (whole, killed):
        stored = [
            batches.write_step(run.local, step, batches.uneven_rows(8, seed=step)) for step in range(STEPS)
        ]

    async def load(client: TrainerClient, run: RunFolder) -> int:
        version = find_resume_point(run).checkpoint_version
        checkpoint = None if version is None else run.path(checkpoint_key(version))
        await client.do(
            LoadPolicy(
                run_id="r",
                incarnation=1,
                model=str(tiny_model),
                folder=run.location,
                checkpoint=checkpoint,
                version=version or 0,
            )
        )
        return version or 0

    async def train(client: TrainerClient, run: RunFolder, steps: range) -> None:
        for step in steps:
            await client.do(TrainStep(folder=run.location, run_id="r", step=step, digest=stored[step]))
            if step % 2:
                await client.do(BeginCheckpoint(folder=run.location, version=step + 1))

    async with run_trainer(config) as (client, process):
        await load(client, whole)
        await train(client, whole, range(STEPS))
        straight = await client.do(DigestState())
        assert await load(client, killed) == 0
        await train(client, killed, range(4))
        await asyncio.sleep(random.Random(0).uniform(0.0, 0.02))
        for pid in rank_pids(process).values():
            with suppress(ProcessLookupError):  # it has ended with the other one
                os.kill(pid, signal.SIGKILL)
    assert list_complete_checkpoints(killed)[:1] == [2]

    async with run_trainer(config) as (client, process):
        first = await load(client, killed)
        assert first in (2, 4)
        await train(client, killed, range(first, STEPS))
        assert await client.do(DigestState()) == straight
        await client.do(AwaitCheckpoint(version=STEPS))
        await load(client, whole)
        pid = rank_pids(process)[1]
        shutil.rmtree(whole.checkpoint(STEPS))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
        assert (await client.do(BeginCheckpoint(folder=whole.location, version=STEPS))).is_new
        with pytest.raises(StoreError, match=r"cannot write .*rank-00001-of-00002.*make room"):
            await client.do(AwaitCheckpoint(version=STEPS))
        assert list_complete_checkpoints(whole) == [2, 4]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await client.do(BeginCheckpoint(folder=whole.location, version=STEPS))
        await client.do(AwaitCheckpoint(version=STEPS))

    shutil.rmtree(killed.checkpoint(STEPS))
    async with run_trainer(config.model_copy(update={"ranks": 1, "zero_stage": 0})) as (client, _):
        await load(client, whole)
        assert await client.do(DigestState()) == straight
        await client.do(ExportPolicy(path=str(tmp_path / "exported")))
        assert await load(client, killed) == 4
        await train(client, killed, range(4, STEPS))
    exported = offline(config, tiny_model, whole.checkpoint(STEPS), tmp_path / "offline")
    assert exported == (tmp_path / "exported" / "model.safetensors").read_bytes()


def offline(config: TrainConfig, model: Path, checkpoint: Path, output: Path) -> bytes:
    file = output.with_suffix(".json")
    settings = ExportConfig(
        train=config, model=str(model), run="r", version=STEPS, checkpoint=str(checkpoint), output=str(output)
    )
    file.write_text(settings.model_dump_json())
    subprocess.run(
        [sys.executable, "-m", "rollmill.tasks.train.checkpoints.hf_export", str(file)], check=True
    )
    return (output / "model.safetensors").read_bytes()


@pytest.mark.parametrize("failing", [0, 1])
def test_any_failure_of_any_rank_ends_the_write_and_removes_it(failing: int) -> None:
    store, calls = HashStore(), list[str]()

    def write_own(rank: int) -> dict[str, StoredFile]:
        if rank == failing:
            raise MemoryError("no memory")
        return {}

    writers = [CheckpointWriter(store, rank, 2, wait_s=0.1) for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.begin(
            Writing(
                3, partial(write_own, rank), lambda _: calls.append("finish"), lambda: calls.append("gone")
            )
        )
    with pytest.raises(StoreError, match="MemoryError: no memory"):
        writers[0].wait(3)
    writers[1].join()
    assert calls == ["gone"]
