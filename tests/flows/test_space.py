"""A disk that will not hold the next step stops the run before that step."""

from pathlib import Path

import pytest
from planned_run import PlannedSampler, PlannedScoring, open_planned_run

from rollmill.flows.configuration.settings import load
from rollmill.flows.step import step_space
from rollmill.flows.step.overlap import StepPipeline
from rollmill.flows.step.step_space import checkpoint_bytes, due_checkpoints
from rollmill.tasks.errors import DiskSpaceError
from rollmill.tasks.train.config import LoraConfig, TrainConfig


async def test_a_step_without_disk_space_is_not_started_and_concurrent_work_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_space, "MIN_FREE_BYTES", 1 << 62)
    settings = {"evaluate": {"every": 0}, "steps": 2}
    sampler = PlannedSampler()
    async with (
        open_planned_run(tmp_path, sampler, PlannedScoring(), **settings) as run,
        StepPipeline(run) as pipeline,
    ):
        pipeline.begin(1)
        await pipeline.finish_evaluation(1)
        with pytest.raises(DiskSpaceError, match=r"step 1 was not begun: .*that stay free.*to resume"):
            await pipeline.collect(1)
    assert not sampler.sampled


def test_the_first_checkpoint_is_expected_by_the_weights_and_their_moments(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert checkpoint_bytes(tmp_path, TrainConfig()) == 3000
    assert checkpoint_bytes(tmp_path, TrainConfig(dtype="bfloat16")) == 6000
    assert checkpoint_bytes(tmp_path, TrainConfig(lora=LoraConfig(rank=8))) == 0


def test_a_checkpoint_is_due_now_and_then_and_after_the_last_step() -> None:
    config = load("quickstart", ("steps=5", "checkpoint.every=2"))
    assert due_checkpoints(config, 5) == [2, 4, 5]
    assert due_checkpoints(config, 3) == [2]
