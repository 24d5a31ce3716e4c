"""The trainer of a replay: separate from that of the run, and each step under the settings that it was trained under."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollmill.flows.configuration.settings import SETTINGS_BY_STEP
from rollmill.flows.offline.replay_trainer import ReplayTrainer, make_scratch
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema, make_batch
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import TrainStep


def test_copies_of_checkpoints_are_on_the_scratch_disk_and_apart_from_those_of_the_runs_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path))
    run = RunFolder("s3://bucket/runs/small")
    with make_scratch(run) as scratch:
        assert scratch.is_relative_to(tmp_path)
        assert not scratch.is_relative_to(run.local)
        monkeypatch.setenv(SCRATCH_ENV, str(scratch))
        assert run.local.is_relative_to(scratch)
    assert not scratch.exists()


@dataclass
class Client:
    """A client of a trainer that makes no update.

    Attributes:
        sent: step, loss and learning rate of each step that it was sent.
    """

    sent: list[tuple[int, str, float]] = field(default_factory=list)

    async def do(self, command: Any) -> StepResult | None:
        if not isinstance(command, TrainStep):
            return None
        given = command.settings
        self.sent.append((command.step, given["train.loss"], given["train.lr"]))
        return StepResult(command.step + 1, updated=False, reason="no spread", metrics=[], duration_s=0.0)


async def train_with_changes(folder: RunFolder) -> None:
    """Store the batches of a run that is resumed with other settings after steps 1 and 2."""
    empty = make_batch("batches", {name: [] for name in dataset_schema("batches").names})
    for steps, train in (
        ((0, 1), {"lr": 0.1}),
        ((2,), {"lr": 0.2}),
        ((3,), {"lr": 0.2, "loss": "reinforce"}),
    ):
        with OpenRun.open(
            folder,
            config={"steps": 4, "train": train},
            fixed={},
            versions={},
            git_commit="",
            config_of=StoreConfig(),
            by_step=SETTINGS_BY_STEP,
        ) as run:
            async with run.writer as writer:
                for step in steps:
                    await writer.append("batches", empty, step=step)


async def test_each_step_is_replayed_under_the_settings_that_it_was_trained_under(tmp_path: Path) -> None:
    folder, client = RunFolder(tmp_path / "run"), Client()
    await train_with_changes(folder)
    trainer: Any = client
    replayed = ReplayTrainer(folder, read_manifest(folder), trainer, tmp_path)
    for step in range(1, 4):
        await replayed.train(step, "")
    assert client.sent == [(1, "ppo_clip", 0.1), (2, "ppo_clip", 0.2), (3, "reinforce", 0.2)]
