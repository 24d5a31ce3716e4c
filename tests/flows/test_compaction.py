"""The command `rollmill compact` on a real run's folder."""

import shutil
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from rollmill.flows.commands.stored_runs import compact_run
from rollmill.tasks.errors import RunLockedError, StoreError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run import writable_run
from rollmill.tasks.store.run.group_ranges import GroupRange, make_plan_rows
from rollmill.tasks.store.run.lock import lock_run
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.writable_run import OpenRun

STEPS = 4


def open_run(folder: RunFolder) -> OpenRun:
    config = StoreConfig(root=str(folder.local.parent))
    return OpenRun.open(
        folder,
        config={"steps": STEPS, "store": config.model_dump(mode="json")},
        fixed={},
        versions={},
        git_commit="",
        config_of=config,
    )


def plan(run: str, step: int, group: int) -> pa.RecordBatch:
    return make_plan_rows(run, step, [GroupRange(group, 1)])


@pytest.fixture
async def folder(tmp_path: Path) -> RunFolder:
    """Four steps of three shards each; the first two are below a checkpoint."""
    folder = RunFolder(tmp_path / "run")
    with open_run(folder) as run:
        async with run.writer as writer:
            for step in range(STEPS):
                for group in range(3):
                    await writer.append("plans", plan(run.manifest.run, step, group), step=step)
    folder.checkpoint(2).mkdir(parents=True)
    (folder.checkpoint(2) / CHECKPOINT_MARKER).touch()
    return folder


def shards_by_step(folder: RunFolder) -> list[int]:
    return [len(open_files(folder).keys(f"plans/step={step:06d}/*.arrow")) for step in range(STEPS)]


def silent(text: str) -> None:
    pytest.fail(text)


async def test_of_a_stopped_run_the_checkpointed_steps_are_compacted_and_of_a_finished_one_all(
    folder: RunFolder,
) -> None:
    before = read(folder, "plans")
    assert "steps after the last checkpoint are unchanged" in await compact_run(folder, 0.1, silent)
    assert shards_by_step(folder) == [1, 1, 3, 3]
    with open_run(folder) as run:
        run.finish()
    assert "now" in await compact_run(folder, 0.1, silent)
    assert shards_by_step(folder) == [1, 1, 1, 1]
    assert read(folder, "plans").combine_chunks().equals(before.combine_chunks())
    assert read_manifest(folder).status == "finished"


async def test_a_run_that_is_written_to_is_not_compacted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writable_run, "lock_run", partial(lock_run, timeout_s=0.0))
    with open_run(folder), pytest.raises(RunLockedError, match="is being written to"):
        await compact_run(folder, 0.1, silent)
    assert shards_by_step(folder) == [3, 3, 3, 3]


async def test_a_partition_that_cannot_be_compacted_is_named_and_the_others_are(folder: RunFolder) -> None:
    first = open_files(folder).keys("plans/step=000000/*.arrow")[0]
    shutil.copy(folder.local / "run.json", folder.local / first)
    messages: list[str] = []
    with pytest.raises(StoreError, match="1 partitions were not compacted"):
        await compact_run(folder, 0.1, messages.append)
    assert first in messages[0]
    assert shards_by_step(folder) == [3, 1, 3, 3]
