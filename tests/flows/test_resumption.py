"""Resuming a run: the line that says what changed, and the steps without an update that are counted on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from planned_run import PlannedSampler, PlannedScoring, open_planned_run
from prefect.logging import disable_run_logger

from rollmill.flows.policies.checkpointing import Checkpointing
from rollmill.flows.policies.run_policy import RunPolicy
from rollmill.flows.run.live_run import SHOWN_CHANGES, Run, describe_resumption
from rollmill.flows.step.report import store_metrics, train_metrics
from rollmill.flows.step.step_collection import collect_step
from rollmill.flows.step.step_groups import store_batch
from rollmill.tasks.errors import SkippedStepsError
from rollmill.tasks.store.run.step_settings import EarlierSettings, describe_setting_changes
from rollmill.tasks.train.service.answers import CheckpointBegun, StepResult
from rollmill.tasks.train.service.commands import BeginCheckpoint, TrainStep


def test_the_line_names_the_run_and_its_changed_settings() -> None:
    line = describe_resumption("runs/quickstart", ["steps: 2 -> 40", "train.lr: 1e-06 -> 1e-05"])
    assert line == "resuming runs/quickstart with steps: 2 -> 40, train.lr: 1e-06 -> 1e-05"
    assert describe_resumption("runs/quickstart", []) == "resuming runs/quickstart"


def test_many_and_long_changes_are_cut() -> None:
    changes = [f"setting.{number}: {'word ' * 100}-> b" for number in range(SHOWN_CHANGES + 3)]
    line = describe_resumption("runs/a", changes)
    assert len(line) < 1000
    assert line.endswith("and 3 more")


def test_each_change_of_settings_has_a_line_with_its_first_step() -> None:
    earlier = [EarlierSettings(3, {"train.lr": 0.1, "train.loss": "ppo_clip"})]
    earlier += [EarlierSettings(5, {"train.lr": 0.2, "train.loss": "ppo_clip"})]
    assert describe_setting_changes(earlier, {"train": {"lr": 0.1, "loss": "reinforce"}}) == [
        "from step 3 on: train.lr: 0.1 -> 0.2",
        "from step 5 on: train.lr: 0.2 -> 0.1, train.loss: 'ppo_clip' -> 'reinforce'",
    ]


class IdleTrainer:
    """Service and client in one, of a trainer whose batches never have a gradient.

    Attributes:
        sent: the settings of each step, in the order in which it was trained.
    """

    name = "trainer"
    process = None

    def __init__(self) -> None:
        self.client = self
        self.sent: list[tuple[int, float]] = []

    async def do(self, command: Any, starts: dict[str, int] | None = None) -> Any:
        match command:
            case TrainStep(step=step, settings=settings):
                self.sent.append((step, settings["train.lr"]))
                return StepResult(step + 1, updated=False, reason="no spread", metrics=[], duration_s=0.0)
            case BeginCheckpoint():
                return CheckpointBegun(is_new=False, held_s=0.0)
            case _:
                return None


@asynccontextmanager
async def open_policy(folder: Path, **train: Any) -> AsyncIterator[tuple[Run, RunPolicy, IdleTrainer]]:
    """The restored policy of a run, and its trainer."""
    settings = {"steps": 9, "evaluate": {"every": 0}, "train": {"max_skipped_steps": 2} | train}
    trainer: Any = IdleTrainer()
    async with open_planned_run(folder, PlannedSampler(), PlannedScoring(), **settings) as run:
        with disable_run_logger():
            async with asyncio.TaskGroup() as tasks:
                policy = RunPolicy(run, trainer, None, Checkpointing(run, trainer, tasks))
                await policy.restore()
                yield run, policy, trainer


async def train_step(run: Run, policy: RunPolicy, step: int) -> None:
    """Sample and train a step, and store its metrics."""
    digest = await store_batch(run, step, (await collect_step.fn(run, step)).outcomes)
    await store_metrics(run, step, train_metrics(await policy.train(step, digest)))


async def test_steps_without_an_update_count_over_a_resume(tmp_path: Path) -> None:
    async with open_policy(tmp_path) as (run, policy, _):
        await train_step(run, policy, 0)
        await train_step(run, policy, 1)
    async with open_policy(tmp_path) as (run, policy, _):
        with pytest.raises(SkippedStepsError, match="3 steps in a row made no update"):
            await train_step(run, policy, 2)
    async with open_policy(tmp_path) as (run, policy, _):
        with pytest.raises(SkippedStepsError, match="4 steps in a row made no update"):
            await train_step(run, policy, 3)


async def test_stored_batches_are_applied_again_under_the_settings_of_their_steps(tmp_path: Path) -> None:
    async with open_policy(tmp_path, lr=0.1) as (run, policy, _):
        await train_step(run, policy, 0)
        await train_step(run, policy, 1)
    async with open_policy(tmp_path, lr=0.2, max_skipped_steps=9) as (run, policy, trainer):
        await train_step(run, policy, 2)
        assert trainer.sent == [(0, 0.1), (1, 0.1), (2, 0.2)]
    async with open_policy(tmp_path, lr=0.3, max_skipped_steps=9) as (run, policy, trainer):
        await train_step(run, policy, 3)
        assert trainer.sent == [(0, 0.1), (1, 0.1), (2, 0.2), (3, 0.3)]
