"""A process that writes to a run which another one has locked."""

import asyncio
from pathlib import Path

import pytest

from rollmill.tasks.errors import RunLockedError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.group_ranges import GroupRange, make_plan_rows
from rollmill.tasks.store.run.joined_run import JoinedRun
from rollmill.tasks.store.run.lock import await_writers
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.shards.shard_names import ShardName
from rollmill.tasks.store.verify.run_verification import verify_run

SHORT_S = 0.05


def open_run(folder: RunFolder) -> OpenRun:
    settings = {"seed": 0, "steps": 1}
    return OpenRun.open(
        folder, config=settings, fixed={}, versions={}, git_commit="", config_of=StoreConfig()
    )


def join(run: OpenRun, name: str = "a") -> JoinedRun:
    return JoinedRun(run.folder, run.manifest.run, run.manifest.epoch, name)


def add_plan(run: OpenRun | JoinedRun, run_id: str) -> asyncio.Future[None]:
    return run.writer.append("plans", make_plan_rows(run_id, 0, [GroupRange(0, 1)]), step=0)


async def test_both_write_under_one_epoch_and_a_merged_shard_replaces_the_shards_of_both(
    tmp_path: Path,
) -> None:
    run = open_run(RunFolder(tmp_path / "run"))
    run_id = run.manifest.run
    async with run.writer, join(run) as joined:
        for _ in range(3):
            await add_plan(joined, run_id)
        run.writer.note_written(joined.take_events())
        await add_plan(run, run_id)
        names = [ShardName.of(path.name) for path in (tmp_path / "run").glob("plans/*/*.arrow")]
        assert sorted((each.epoch, each.number) for each in names if each) == [(1, n) for n in range(4)]
        await run.writer.compact("plans/step=000000", 1 << 20)
        assert read(run.folder, "plans").num_rows == 4
    run.close()
    assert not [each for each in verify_run(run.folder).findings if "inventory" in each.what]


async def test_who_opens_the_run_waits_for_a_process_that_still_writes(tmp_path: Path) -> None:
    run = open_run(RunFolder(tmp_path / "run"))
    async with run.writer:
        joined = join(run)
        async with joined:
            with pytest.raises(RunLockedError):
                await_writers(run.folder, timeout_s=SHORT_S)
            with pytest.raises(RunLockedError):
                await_writers(run.folder, ["a"], SHORT_S)
            await_writers(run.folder, ["b"], SHORT_S)
        await_writers(run.folder, timeout_s=SHORT_S)
    assert not run.folder.writers.exists()
    run.close()


async def test_a_run_opens_once_the_last_process_of_the_earlier_epoch_has_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    first = open_run(folder)
    async with first.writer, join(first):
        # As if the process that held the lock were killed.
        first.close()
        opening = asyncio.create_task(asyncio.to_thread(open_run, folder))
        while read_manifest(folder).epoch == first.manifest.epoch:  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0)
        assert not opening.done()
    second = await opening
    assert second.manifest.epoch == 2
    second.close()


async def test_a_process_that_joins_late_finds_another_epoch_and_stores_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    first = open_run(folder)
    late = join(first)
    first.close()
    second = open_run(folder)
    with pytest.raises(RunLockedError, match="another process has resumed it"):
        await late.__aenter__()
    await_writers(folder, timeout_s=SHORT_S)
    second.close()
