"""A run that begins at a step of another."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollmill.tasks.errors import ConfigError, StoreError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files, publish_text, read_text
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.fork_copy import bring_checkpoint, fork_run
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest
from rollmill.tasks.store.run.resume import ResumePoint, find_resume_point, list_complete_checkpoints
from rollmill.tasks.store.run.step_settings import list_setting_changes
from rollmill.tasks.store.run.writable_run import OpenRun

RowMaker = Callable[..., pa.RecordBatch]
CONFIG: dict[str, Any] = {"seed": 0, "steps": 9}
CONFIG_OF = StoreConfig()


def open_run(folder: RunFolder, config: dict[str, Any] = CONFIG) -> OpenRun:
    return OpenRun.open(folder, config=config, fixed={}, versions={}, git_commit="", config_of=CONFIG_OF)


async def train_run(folder: RunFolder, rows: RowMaker) -> OpenRun:
    """A run of four trained steps, and checkpoints of the versions 1 and 3."""
    run = open_run(folder)
    async with run.writer as writer:
        for step in range(4):
            for dataset in ("rollouts", "batches", "metrics"):
                writer.append(dataset, rows(dataset, run=run.manifest.run, step=step), step=step)
            writer.append("scores", rows("scores", step=step), scorer="addition@1", step=step)
            writer.append("evaluations", rows("evaluations", step=step, policy_version=step), version=step)
    for version in (1, 3):
        at = f"checkpoints/version={version:06d}"
        publish_text(run.files, f"{at}/state/weights.pt", b"weights")
        progress = {"run": run.manifest.run, "version": version, "digest": "d"}
        publish_text(run.files, f"{at}/COMPLETE.json", json.dumps(progress).encode())
    return run


async def test_a_fork_has_the_rows_before_its_step_and_the_last_checkpoint(root: str, rows: RowMaker) -> None:
    source, target = RunFolder(f"{root}/source"), RunFolder(f"{root}/target")
    with await train_run(source, rows) as run:
        fork_run(source, 2, target, CONFIG | {"seed": 1}, CONFIG_OF, {})  # while the source is written to
        manifest = read_manifest(target)
        assert manifest.run_at_step(1) == manifest.origins[0].run == run.manifest.run
        assert manifest.run_at_step(2) == manifest.run != run.manifest.run
    for dataset in ("rollouts", "batches", "metrics", "scores", "evaluations"):
        brought = read(target, dataset)
        assert sorted(brought["step"].to_pylist()) == [0, 1]
        assert brought.equals(read(source, dataset).slice(0, 2))
    assert find_resume_point(target) == ResumePoint(checkpoint_version=1, stored_batches=2)
    marker = json.loads(read_text(open_files(target), "checkpoints/version=000001/COMPLETE.json"))
    assert marker.pop("content_xxh3_64")
    assert marker == {"run": manifest.run, "version": 1, "digest": "d"}
    with open_run(target, CONFIG | {"seed": 1}) as forked:
        assert forked.manifest.epoch > run.manifest.epoch


def inode(folder: RunFolder, key: str) -> int:
    return (folder.local / key).stat().st_ino


async def test_files_on_the_same_disk_are_not_copied(tmp_path: Path, rows: RowMaker) -> None:
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    (await train_run(source, rows)).close()
    fork_run(source, 4, target, CONFIG, CONFIG_OF, {})
    for key in (
        *open_files(source).keys("rollouts/**/*.arrow"),
        "checkpoints/version=000003/state/weights.pt",
    ):
        assert inode(source, key) == inode(target, key)


async def test_a_checkpoint_that_the_source_removes_while_it_is_forked_is_replaced_by_the_one_before(
    tmp_path: Path, rows: RowMaker
) -> None:
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    brought: list[str] = []

    def bring(key: str) -> None:
        brought.append(key)
        if "version=000003" in key:
            run.files.remove(["checkpoints/version=000003/COMPLETE.json"])

    with await train_run(source, rows) as run:
        bring_checkpoint(source, 4, "new", open_files(target), bring)
        assert [key.split("/")[1] for key in brought] == ["version=000003", "version=000001"]
        assert list_complete_checkpoints(target) == [1]
        run.files.remove(["checkpoints/version=000001/COMPLETE.json"])
        bring_checkpoint(source, 4, "new", open_files(target), bring)
        assert len(brought) == 2


async def test_a_fork_that_was_killed_is_finished_by_the_same_command_and_by_no_other(
    tmp_path: Path, rows: RowMaker
) -> None:
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    (await train_run(source, rows)).close()
    fork_run(source, 2, target, CONFIG, CONFIG_OF, {})
    whole = read_manifest(target)
    write_manifest_of_a_killed_one(target)
    with pytest.raises(StoreError, match="is an unfinished fork"):
        open_run(target)
    with pytest.raises(ConfigError, match=r"not a fork of .* at step 3"):
        fork_run(source, 3, target, CONFIG, CONFIG_OF, {})
    fork_run(source, 2, target, CONFIG, CONFIG_OF, {})
    assert read_manifest(target) == whole
    assert sorted(read(target, "rollouts")["step"].to_pylist()) == [0, 1]


async def test_a_fork_that_is_repeated_has_the_epoch_of_a_source_that_was_opened_since(
    tmp_path: Path, rows: RowMaker
) -> None:
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    (await train_run(source, rows)).close()
    fork_run(source, 2, target, CONFIG, CONFIG_OF, {})
    write_manifest_of_a_killed_one(target)
    before = read_manifest(source)
    write_manifest(open_files(source), replace(before, epoch=before.epoch + 3), before)
    fork_run(source, 2, target, CONFIG, CONFIG_OF, {})
    assert read_manifest(target).epoch == before.epoch + 3


def write_manifest_of_a_killed_one(target: RunFolder) -> None:
    whole = read_manifest(target)
    write_manifest(open_files(target), replace(whole, status="forking"), whole)
    open_files(target).remove(open_files(target).keys("rollouts/step=000001/*"))


async def test_a_fork_of_a_fork_lists_the_origins_of_its_rows(tmp_path: Path, rows: RowMaker) -> None:
    first, second, third = (RunFolder(tmp_path / name) for name in ("first", "second", "third"))
    (await train_run(first, rows)).close()
    fork_run(first, 3, second, CONFIG, CONFIG_OF, {})
    fork_run(second, 2, third, CONFIG, CONFIG_OF, {})
    manifest = read_manifest(third)
    assert [(each.run, each.step) for each in manifest.origins] == [
        (read_manifest(first).run, 2),
        (read_manifest(second).run, 2),
    ]
    assert manifest.run_at_step(0) == read_manifest(first).run


async def test_a_fork_has_the_settings_that_the_steps_before_it_were_trained_under(
    tmp_path: Path, rows: RowMaker
) -> None:
    first, second, third = (RunFolder(tmp_path / name) for name in ("first", "second", "third"))
    (await train_run(first, rows)).close()
    by_step = {"train.lr": 0.0}
    changed, last = CONFIG | {"train": {"lr": 0.2}}, CONFIG | {"train": {"lr": 0.3}}
    OpenRun.open(
        first, config=changed, fixed={}, versions={}, git_commit="", config_of=CONFIG_OF, by_step=by_step
    ).close()
    fork_run(first, 3, second, last, CONFIG_OF, by_step)
    fork_run(second, 2, third, changed, CONFIG_OF, by_step)
    for folder, rates in (
        (first, [0.0] * 4 + [0.2]),
        (second, [0.0] * 3 + [0.3] * 2),
        (third, [0.0] * 2 + [0.2] * 3),
    ):
        manifest = read_manifest(folder)
        assert [manifest.find_settings(step, by_step)["train.lr"] for step in range(5)] == rates, folder.name


async def test_a_fork_with_the_first_settings_again_has_them_before_its_step(
    tmp_path: Path, rows: RowMaker
) -> None:
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    (await train_run(source, rows)).close()
    by_step = {"train.lr": 0.0}
    changed = CONFIG | {"train": {"lr": 0.2}}
    OpenRun.open(
        source, config=changed, fixed={}, versions={}, git_commit="", config_of=CONFIG_OF, by_step=by_step
    ).close()
    first = CONFIG | {"train": {"lr": 0.0}}
    fork_run(source, 3, target, first, CONFIG_OF, by_step)
    manifest = read_manifest(target)
    assert [manifest.find_settings(step, by_step)["train.lr"] for step in range(5)] == [0.0] * 5
    kept = manifest.keep_earlier_settings(3, first, by_step)
    assert [(each.until_step, each.settings) for each in kept] == [(3, {"train.lr": 0.0})]
    assert list_setting_changes(kept, first) == {}


async def test_a_fork_without_recorded_settings_has_those_of_its_source_before_its_step(
    tmp_path: Path, rows: RowMaker
) -> None:
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    (await train_run(source, rows)).close()
    fork_run(source, 3, target, CONFIG | {"train": {"lr": 0.2}}, CONFIG_OF, {})
    by_step = {"train.lr": 0.1}
    manifest = read_manifest(target)
    assert [manifest.find_settings(step, by_step)["train.lr"] for step in (2, 3)] == [0.1, 0.2]
    given = {"train": {"lr": 0.5}}
    kept = manifest.keep_earlier_settings(4, given, by_step)
    assert [(each.until_step, each.settings["train.lr"]) for each in kept] == [(3, 0.1), (4, 0.2)]


async def test_a_step_that_is_not_trained_cannot_be_forked_at(tmp_path: Path, rows: RowMaker) -> None:
    source = RunFolder(tmp_path / "source")
    (await train_run(source, rows)).close()
    with pytest.raises(ConfigError, match=r"STEP = 5: .*has 4 trained steps"):
        fork_run(source, 5, RunFolder(tmp_path / "target"), CONFIG, CONFIG_OF, {})
