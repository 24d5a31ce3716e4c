"""The inventory knows every shard, whoever wrote it and however that ended."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read_shard
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.shards.inventory import is_recorded, list_shard_sizes, read_inventory

RowMaker = Callable[..., pa.RecordBatch]


def open_run(root: Path) -> OpenRun:
    folder = RunFolder(root / "a")
    return OpenRun.open(
        folder, config={}, fixed={}, versions={}, git_commit="", config_of=StoreConfig(root=str(root))
    )


def unknown(folder: RunFolder) -> list[str]:
    notes = read_inventory(folder)
    return [key for key in list_shard_sizes(open_files(folder)) if not is_recorded(notes, key)]


async def test_a_step_costs_the_inventory_one_shard_and_only_its_newest_is_noted_nowhere(
    tmp_path: Path, rows: RowMaker
) -> None:
    with open_run(tmp_path) as run:
        async with run.writer as writer:
            for step in range(3):
                for group in range(4):
                    await writer.append("rollouts", rows("rollouts", step=step, group=group), step=step)
                await writer.note()
            await writer.note()
    files = open_files(run.folder)
    inventory = files.keys("shards/epoch=000001/*.arrow")
    assert len(inventory) == 3
    assert unknown(run.folder) == inventory[-1:]
    notes = read_inventory(run.folder)
    for key, size in list_shard_sizes(files).items():
        if key in notes:
            assert notes[key].bytes == size
            assert notes[key].rows == read_shard(run.folder, key).num_rows


async def test_the_next_writer_records_the_shards_that_a_killed_one_did_not(
    tmp_path: Path, rows: RowMaker
) -> None:
    with open_run(tmp_path) as run:
        await run.writer.__aenter__()
        await run.writer.append("rollouts", rows("rollouts", step=0, group=1), step=0)
        left = unknown(run.folder)
        assert len(left) == 1
    with open_run(tmp_path) as run:
        async with run.writer:
            assert all(is_recorded(read_inventory(run.folder), key) for key in left)
    assert [key.partition("/")[0] for key in unknown(run.folder)] == ["shards"]


async def test_compacted_and_removed_shards_are_recorded(tmp_path: Path, rows: RowMaker) -> None:
    with open_run(tmp_path) as run:
        async with run.writer as writer:
            for group in range(3):
                made = rows("rollouts", step=0, group=group, trajectory_id=f"t{group}")
                await writer.append("rollouts", made, step=0)
            small = open_files(run.folder).keys("rollouts/step=000000/*.arrow")
            compacted = await writer.compact("rollouts/step=000000", 1 << 30)
            await writer.remove(small)
    notes = read_inventory(run.folder)
    assert {notes[key].event for key in small} == {"removed"}
    assert (notes[compacted].event, notes[compacted].rows) == ("written", 3)
    assert {key.partition("/")[0] for key in unknown(run.folder)} == {"shards"}


async def test_a_cancelled_writer_notes_its_last_shards_too(tmp_path: Path, rows: RowMaker) -> None:
    with open_run(tmp_path) as run:
        await run.writer.__aenter__()
        run.writer.append("rollouts", rows("rollouts", step=0), step=0)
        run.writer._close()
    assert [key.partition("/")[0] for key in unknown(run.folder)] == ["shards"]


async def test_compacted_shards_of_the_inventory_itself_are_noted(tmp_path: Path, rows: RowMaker) -> None:
    for epoch in (1, 2):
        with open_run(tmp_path) as run:
            async with run.writer as writer:
                for step in (2 * epoch, 2 * epoch + 1):
                    await writer.append("groups", rows("groups", step=step), step=step)
                    await writer.note()
                for each in range(1, epoch * (epoch - 1) + 1):  # the second writer compacts both
                    assert await writer.compact(f"shards/epoch={each:06d}", 1 << 30)
    newest = open_files(run.folder).keys("shards/epoch=000002/*.arrow")[-1]
    assert unknown(run.folder) == [newest]
