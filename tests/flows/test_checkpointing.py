"""A trainer that dies while it trains or writes a checkpoint, or cannot write one; the trainer follows a plan."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from planned_run import PlannedSampler, PlannedScoring, open_planned_run
from prefect.logging import disable_run_logger

from rollmill.flows.policies.checkpointing import Checkpointing
from rollmill.flows.policies.run_policy import RunPolicy
from rollmill.flows.policies.sync_report import SyncReport
from rollmill.flows.step.step_collection import collect_step
from rollmill.flows.step.step_groups import store_batch
from rollmill.tasks.errors import (
    LeaseLostError,
    RequestError,
    RollmillError,
    ServiceDiedError,
    ServiceStartError,
    StoreError,
)
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder
from rollmill.tasks.store.run.resume import list_complete_checkpoints
from rollmill.tasks.train.service.answers import CheckpointBegun, CheckpointWritten, StepResult
from rollmill.tasks.train.service.commands import AwaitCheckpoint, BeginCheckpoint, Command, TrainStep

DIED = ServiceDiedError("trainer", "its process ended with status -9")


class Trainer:
    """Service, process and client in one.

    Attributes:
        fates: the error that each write ends with, one after another; None or none left: it is complete.
        deaths: whether it dies in each training of a step, one after another; none left: it does not.
        begun: versions whose checkpoints were begun.
        starts: how often it was started again.
        failed_starts: how many of the next starts fail.
    """

    name = "trainer"
    span_processes = ("trainer/0",)

    def __init__(self, folder: RunFolder, *fates: RollmillError | None) -> None:
        self.folder, self.fates = folder, list(fates)
        self.deaths: list[bool] = []
        self.begun: list[int] = []
        self.starts = self.failed_starts = 0
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.client = self.process = self

    def log_tail(self) -> str:
        return ""

    async def stop(self) -> None:
        pass

    async def start(self) -> None:
        await self.may_start.wait()
        self.starts += 1
        if self.failed_starts:
            self.failed_starts -= 1
            raise ServiceStartError(self.name, "no memory")

    async def do(self, command: Command[Any], starts: dict[str, int] | None = None) -> Any:
        match command:
            case TrainStep() if self.deaths and self.deaths.pop(0):
                raise DIED
            case TrainStep(step=step):
                return StepResult(step + 1, updated=True, reason="", metrics=[], duration_s=0.0)
            case BeginCheckpoint(version=version):
                self.begun.append(version)
                is_new = version not in list_complete_checkpoints(self.folder)
                return CheckpointBegun(is_new=is_new, held_s=0.0)
            case AwaitCheckpoint(version=version):
                return self._end(version)
            case _:
                return None

    def _end(self, version: int) -> CheckpointWritten:
        if error := self.fates.pop(0) if self.fates else None:
            raise error
        self.folder.checkpoint(version).mkdir(parents=True)
        (self.folder.checkpoint(version) / CHECKPOINT_MARKER).write_text("{}")
        return CheckpointWritten(version, written_s=0.0, n_bytes=0)


@asynccontextmanager
async def train_policy(
    folder: Path, *fates: RollmillError | None, max_restarts: int = 1
) -> AsyncIterator[tuple[RunPolicy, Trainer]]:
    """A policy at version 1, of which a checkpoint is due and may be begun."""
    settings = {"steps": 1, "max_restarts": max_restarts, "evaluate": {"every": 0}}
    async with open_planned_run(folder, PlannedSampler(), PlannedScoring(), **settings) as run:
        trainer = Trainer(run.folder, *fates)
        with disable_run_logger():
            await store_batch(run, 0, (await collect_step.fn(run, 0)).outcomes)
            async with asyncio.TaskGroup() as tasks:
                policy = RunPolicy(run, trainer, None, Checkpointing(run, trainer.client, tasks))
                policy.trained.current = PolicyVersion(run.id, 1, 1)
                yield policy, trainer


async def test_a_checkpoint_whose_trainer_dies_is_started_again(tmp_path: Path) -> None:
    async with train_policy(tmp_path, DIED) as (policy, trainer):
        await policy.checkpoint_if_due()
        await policy.finish_checkpoints()
    assert (trainer.starts, trainer.begun) == (1, [1, 1])
    assert list_complete_checkpoints(trainer.folder) == [1]


async def test_a_checkpoint_from_before_a_restart_is_started_again_whatever_the_new_trainer_answers(
    tmp_path: Path,
) -> None:
    """Another call finds the trainer dead; its successor, which is still being restarted, has no record of the write."""
    async with train_policy(tmp_path, RequestError("trainer: no such operation")) as (policy, trainer):
        await policy.checkpoint_if_due()
        trainer.may_start.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(brought_back(policy))
            await asyncio.sleep(0.05)
            tasks.create_task(policy.finish_checkpoints())
            await asyncio.sleep(0.05)
            trainer.may_start.set()
    assert (trainer.starts, trainer.begun) == (1, [1, 1])
    assert list_complete_checkpoints(trainer.folder) == [1]


async def brought_back(policy: RunPolicy) -> None:
    """As any command does that finds the trainer dead."""
    async with policy._still:
        await policy._bring_back_trainer(DIED)


@pytest.mark.parametrize("error", [StoreError("cannot remove it"), LeaseLostError("taken over")])
async def test_an_old_checkpoint_that_cannot_be_removed_ends_a_run_only_if_another_process_has_it(
    tmp_path: Path, error: StoreError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("rollmill.flows.policies.checkpointing.remove_checkpoints", refuse)
    async with train_policy(tmp_path) as (policy, trainer):
        await policy.checkpoint_if_due()
        with pytest.raises(LeaseLostError) if isinstance(error, LeaseLostError) else nullcontext():
            await policy.finish_checkpoints()
    assert list_complete_checkpoints(trainer.folder) == [1]


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_starts_nothing(tmp_path: Path) -> None:
    async with train_policy(tmp_path, StoreError("disk full")) as (policy, trainer):
        await policy.checkpoint_if_due()
        with pytest.raises(StoreError, match="disk full"):
            await policy.finish_checkpoints()
    assert (trainer.starts, trainer.begun) == (0, [1])


async def test_a_trainer_that_dies_at_every_write_ends_the_run(tmp_path: Path) -> None:
    async with train_policy(tmp_path, DIED, DIED, DIED) as (policy, trainer):
        await policy.checkpoint_if_due()
        with pytest.raises(ServiceDiedError, match="after 1 restarts"):
            await policy.finish_checkpoints()
    assert trainer.begun == [1, 1]


@pytest.mark.parametrize(
    ("deaths", "failed_starts"),
    [([True, True, True, False], 0), ([True, True, False], 1), ([True, False], 2)],
)
async def test_a_trainer_that_fails_while_it_is_brought_back_is_restarted_again(
    tmp_path: Path, deaths: list[bool], failed_starts: int
) -> None:
    async with train_policy(tmp_path, max_restarts=3) as (policy, trainer):
        trainer.deaths, trainer.failed_starts = list(deaths), failed_starts
        await policy.train(0, "")
    assert trainer.starts == 1 + deaths[1:].count(True) + failed_starts


class Servers:
    """Note which versions they get."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.parity = self

    async def note_trainer_before(self, version: PolicyVersion) -> None:
        pass

    async def note_servers_before(self, version: PolicyVersion) -> None:
        pass

    async def update(self, version: PolicyVersion, *, only_name: bool) -> list[SyncReport]:
        self.versions.append(version.version)
        return []


async def test_servers_keep_their_version_until_the_sync_when_a_trainer_dies(tmp_path: Path) -> None:
    """An evaluation may be sampling from them."""
    async with train_policy(tmp_path) as (policy, trainer):
        policy._servers = servers = Servers()
        policy.trained.current = PolicyVersion(policy._run.id, 1, 0)
        trainer.deaths = [True, False]
        await policy.train(0, "")
        assert (policy.trained.version, servers.versions) == (1, [])


async def test_a_trainer_that_dies_while_a_run_is_restored_is_restarted(tmp_path: Path) -> None:
    async with train_policy(tmp_path, max_restarts=3) as (policy, trainer):
        trainer.deaths, trainer.failed_starts = [True, True, False], 1
        assert await policy.restore() == 1
    assert trainer.starts == 3
    async with train_policy(tmp_path / "other") as (policy, trainer):
        trainer.deaths = [True, True]
        with pytest.raises(ServiceDiedError, match="after 1 restarts in a row"):
            await policy.restore()


async def test_a_trainer_that_never_starts_again_ends_the_run(tmp_path: Path) -> None:
    async with train_policy(tmp_path, max_restarts=3) as (policy, trainer):
        trainer.deaths, trainer.failed_starts = [True], 9
        with pytest.raises(ServiceDiedError, match="no memory, after 3 restarts in a row"):
            await policy.train(0, "")
    assert trainer.starts == 3


async def test_a_finished_step_allows_the_trainer_to_be_restarted_again(tmp_path: Path) -> None:
    async with train_policy(tmp_path) as (policy, trainer):
        # Each death is followed by a restart, which trains on the stored batch again.
        trainer.deaths = [True, False, False, True, False, True]
        for _ in range(3):
            await policy.train(0, "")
        assert trainer.starts == 2
        with pytest.raises(ServiceDiedError, match="after 1 restarts in a row"):
            await policy.train(0, "")
