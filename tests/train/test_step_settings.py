"""Settings by step: which may change between two steps, and that a run's record of them is checked against its metrics."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rollmill.flows.configuration.settings import SETTINGS_BY_STEP
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest
from rollmill.tasks.store.run.step_settings import EarlierSettings
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema, make_batch
from rollmill.tasks.store.verify.run_views import RunView
from rollmill.tasks.train.config import (
    ImportanceConfig,
    KLConfig,
    TrainConfig,
    settings_by_step,
    with_settings,
)
from rollmill.tasks.train.lr_schedule import learning_rate
from rollmill.tasks.train.settings_verification import find_wrong_settings

BEFORE = TrainConfig(lr=0.1, warmup_steps=3)
AFTER = TrainConfig(lr=0.4, warmup_steps=4, lr_decay="linear", lr_decay_updates=9)


def test_settings_replace_those_of_the_trainer_by_name() -> None:
    ours = TrainConfig(
        lr=0.5, betas=(0.8, 0.9), kl=KLConfig(coef=0.1), importance=ImportanceConfig(bounds=(0.0, 3.0))
    )
    theirs = TrainConfig(ranks=2, lr=0.1, clip_high=0.9, kl=KLConfig(reference="frozen"))
    kl = KLConfig(reference="frozen", coef=0.1)
    assert with_settings(theirs, settings_by_step(ours)) == ours.model_copy(update={"ranks": 2, "kl": kl})


@pytest.mark.parametrize(
    "name", ["train.dtype", "train.lora.rank", "train.kl.reference", "train.ranks", "steps"]
)
def test_other_settings_cannot_change_between_two_steps(name: str) -> None:
    assert name not in SETTINGS_BY_STEP
    with pytest.raises(ConfigError, match="no setting of this name can change between two steps"):
        with_settings(TrainConfig(), {name: 1})


def test_an_invalid_value_is_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"train\.kl\.coef = -1"):
        with_settings(TrainConfig(), {"train.kl.coef": -1})


async def write_run(folder: Path, rates: Sequence[float | None], changed_at: int) -> RunFolder:
    """A run of these learning rates by step, one update each (None: no update), whose settings changed at a step."""
    given = {"fixed": {}, "versions": {}, "git_commit": "", "config_of": StoreConfig()}
    steps, store = len(rates), RunFolder(folder / "run")
    for first, end, train in ((0, changed_at, BEFORE), (changed_at, steps, AFTER)):
        config = {"steps": steps, "train": train.model_dump(mode="json")}
        with OpenRun.open(store, config=config, by_step=SETTINGS_BY_STEP, **given) as run:
            async with run.writer as writer:
                for step in range(first, end):
                    rate = rates[step]
                    updated = {"train/updated": float(rate is not None)}
                    found = (
                        updated
                        if rate is None
                        else {"train/learning_rate": rate, "train/updates": 1.0} | updated
                    )
                    columns = {"run": "r", "step": step, "env": "all", "stat": "value"}
                    repeated = {name: [value] * len(found) for name, value in columns.items()}
                    names = {"name": [*found], "value": [*found.values()]}
                    writer.append("metrics", make_batch("metrics", repeated | names), step=step)
                    writer.append("batches", make_batch("batches", empty_batch()), step=step)
    return store


def empty_batch() -> dict[str, list[object]]:
    return {name: [] for name in dataset_schema("batches").names}


def right_rates(changed_at: int, n_steps: int) -> list[float]:
    return [learning_rate(BEFORE if step < changed_at else AFTER, step) for step in range(n_steps)]


def find(folder: RunFolder) -> list[str]:
    return [each.what for each in find_wrong_settings(RunView.open(folder))]


async def test_the_learning_rates_of_a_run_are_those_of_its_settings_by_step(tmp_path: Path) -> None:
    folder = await write_run(tmp_path, right_rates(2, 6), 2)
    assert find(folder) == []
    stored = read_manifest(folder)
    write_manifest(open_files(folder), replace(stored, earlier_settings=()), stored)
    # The first rate is 0.1 of both.
    assert find(folder) == [
        "the learning rate of 2 steps is not the one of their settings: step 0 has 0.03333333333333333, 0.1 expected, "
        "step 1 has 0.06666666666666667, 0.2 expected"
    ]


async def test_a_step_without_an_update_does_not_advance_the_schedule(tmp_path: Path) -> None:
    first, second, third = right_rates(9, 3)
    assert find(await write_run(tmp_path, [first, None, second, third], 4)) == []


async def test_records_out_of_order_are_found(tmp_path: Path) -> None:
    folder = await write_run(tmp_path, right_rates(2, 4), 2)
    for ends in ([3, 2], [2, 2], [9], [0]):
        stored = read_manifest(folder)
        records = tuple(EarlierSettings(end, {}) for end in ends)
        write_manifest(open_files(folder), replace(stored, earlier_settings=records), stored)
        assert find(folder) == [
            f"its earlier_settings end at steps {', '.join(map(str, ends))}, and 4 steps are done"
        ]


def test_stage_0_is_recorded_as_the_stage_1_that_bfloat16_trains_under() -> None:
    assert TrainConfig(dtype="float32").zero_stage == 0
    assert TrainConfig(dtype="bfloat16").zero_stage == 1
    assert TrainConfig(zero_stage=0, dtype="bfloat16").zero_stage == 1
    assert TrainConfig(zero_stage=3, dtype="bfloat16").zero_stage == 3
