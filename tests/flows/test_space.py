"""A disk that will not hold the next step stops the run before that step."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.beside import Beside
from flows.running.space import checkpoint_bytes, due_checkpoints
from flows.settings import load
from flows.ui.step_runs import StepRuns
from tasks.errors import DiskSpaceError
from tasks.observe.config import ObserveConfig
from tasks.store.layout import RunFolder
from tasks.train.config import LoraConfig, TrainConfig


async def test_a_step_without_room_is_not_begun_and_what_goes_on_beside_it_is_left_alone(
    tmp_path: Path,
) -> None:
    config = load("quickstart", (f"store.min_free_bytes={1 << 62}", "evaluate.enabled=false"))
    run = SimpleNamespace(
        config=config,
        model=tmp_path,
        folder=RunFolder(tmp_path),
        store=SimpleNamespace(manifest=SimpleNamespace(trains=True)),
        step_runs=StepRuns(ObserveConfig(step_runs=False), "run"),
    )
    async with Beside(run) as beside:  # type: ignore[arg-type]
        beside.begin(1)
        await beside.evaluated(1)
        with pytest.raises(DiskSpaceError, match=r"step 1 was not begun: .*store\.min_free_bytes.*goes on"):
            await beside.collected(1)


def test_the_first_checkpoint_is_expected_by_the_weights_and_their_moments(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert checkpoint_bytes(tmp_path, TrainConfig()) == 3000
    assert checkpoint_bytes(tmp_path, TrainConfig(dtype="bfloat16")) == 6000
    assert checkpoint_bytes(tmp_path, TrainConfig(lora=LoraConfig(rank=8))) == 0


def test_a_checkpoint_is_due_now_and_then_and_after_the_last_step() -> None:
    config = load("quickstart", ("steps=5", "train.checkpoint_every=2"))
    assert due_checkpoints(config, 5) == [2, 4, 5]
    assert due_checkpoints(config, 3) == [2]
