"""Compaction: one shard takes the place of many, and no reader sees a row twice or not at all."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files, publish_text, read_text
from rollmill.tasks.store.folders import PARTITION_KEYS, RunFolder, partition_folder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.schemas import SCHEMAS
from rollmill.tasks.store.shards.compactor import Compactor
from rollmill.tasks.store.shards.shard import join_batches
from rollmill.tasks.store.shards.shard_compaction import is_worthwhile
from rollmill.tasks.store.shards.shard_names import current_shards, list_superseded_shards
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]
SOON = StoreConfig(compaction_grace_s=0.1, compact="after_grace")
ANY_SIZE = 1 << 40
VALUES = {"policy": "trainer", "scorer": "addition@1", "env": "addition", "step": 0, "version": 0, "epoch": 1}


def shards(folder: RunFolder) -> list[str]:
    return open_files(folder).keys("*/**/*.arrow")


def ids_of(folder: RunFolder, **partition: int) -> list[str]:
    return list(read(folder, "rollouts", ["trajectory_id"], **partition)["trajectory_id"].to_pylist())


async def append_one_by_one(writer: RunWriter, rows: RowMaker, ids: Sequence[str], step: int = 0) -> None:
    """A shard for each row."""
    for each in ids:
        await writer.append("rollouts", rows("rollouts", step=step, trajectory_id=each), step=step)


def never(text: str) -> None:
    pytest.fail(text)


@pytest.mark.parametrize("dataset", sorted(SCHEMAS))
async def test_a_compacted_shard_has_the_rows_of_all_earlier_shards_in_order(
    dataset: str, folder: RunFolder, rows: RowMaker
) -> None:
    partition = {key: VALUES[key] for key in PARTITION_KEYS[dataset]}
    where = partition_folder(dataset, partition)
    columns = {"policy_version": 0} if dataset == "evaluations" else {}
    columns |= {"step": 0} if "step" in partition else {}
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for n in range(3):
            if "trajectory_id" in SCHEMAS[dataset].names:
                columns["trajectory_id"] = [f"{n}.0", f"{n}.1"]
            await writer.append(dataset, rows(dataset, 2, **columns), **partition)
        before = read(folder, dataset)
        key = await writer.compact(where, ANY_SIZE)
        assert current_shards(open_files(folder).keys(f"{where}/*.arrow"))[-1:] == [key]
        assert read(folder, dataset).combine_chunks().equals(before.combine_chunks(), check_metadata=True)
        await writer.remove(list_superseded_shards(shards(folder)))
        assert [each for each in shards(folder) if each.startswith(where)] == [key]
        assert read(folder, dataset).combine_chunks().equals(before.combine_chunks(), check_metadata=True)
        assert not await writer.compact(where, ANY_SIZE)


async def test_rows_appended_during_and_after_a_compaction_are_kept(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        await append_one_by_one(writer, rows, ["a", "b"])
        late = [writer.append("rollouts", rows("rollouts", step=0, trajectory_id="c"), step=0)]
        compacting = writer.compact("rollouts/step=000000", ANY_SIZE)
        late += [writer.append("rollouts", rows("rollouts", step=0, trajectory_id="d"), step=0)]
        await compacting
        await writer.flush()
        assert sorted(ids_of(folder)) == ["a", "b", "c", "d"]
    async with RunWriter(open_files(folder), epoch=2, flush_s=0.0) as writer:
        await append_one_by_one(writer, rows, ["e"])
        await writer.compact("rollouts/step=000000", ANY_SIZE)
        await append_one_by_one(writer, rows, ["f"])
        await writer.remove(list_superseded_shards(shards(folder)))
    assert sorted(ids_of(folder)) == ["a", "b", "c", "d", "e", "f"]
    assert len(shards(folder)) == 2


ACTIONS = st.lists(st.sampled_from(["append", "append", "late", "compact", "remove", "reopen"]), max_size=25)


@pytest.mark.slow
@given(ACTIONS)
@settings(max_examples=60, deadline=None)
def test_every_row_is_read_once_in_order_for_any_order_of_appends_compactions_and_removals(
    rows: RowMaker, actions: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(root)
        folder.tmp.mkdir()
        asyncio.run(carry_out(folder, rows, actions))


async def carry_out(folder: RunFolder, rows: RowMaker, actions: Sequence[str]) -> None:
    expected: list[str] = []
    lives = [list(life) for is_reopen, life in itertools.groupby(actions, "reopen".__eq__) if not is_reopen]
    for epoch, life in enumerate(lives, 1):
        async with RunWriter(open_files(folder), epoch, flush_s=0.0) as writer:
            for action in life:
                if action in ("append", "late"):
                    expected.append(f"{len(expected)}")
                    row = rows("rollouts", step=0, trajectory_id=expected[-1])
                    appended = writer.append("rollouts", row, step=0)
                    if action == "append":
                        await appended
                elif action == "compact":
                    await writer.compact("rollouts/step=000000", ANY_SIZE)
                else:
                    await writer.remove(list_superseded_shards(shards(folder)))
                stored = ids_of(folder)
                assert stored == expected[: len(stored)]
        assert ids_of(folder) == expected


@given(st.lists(st.integers(1, 400), max_size=30), st.integers(1, 20_000))
def test_pieces_have_all_rows_in_order_and_the_requested_size(sizes: list[int], asked: int) -> None:
    batches = [pa.record_batch({"n": pa.array([at] * size, pa.int64())}) for at, size in enumerate(sizes)]
    n_bytes = [pa.ipc.get_record_batch_size(batch) for batch in batches]
    made = [piece["n"].to_pylist() for piece in join_batches(batches, asked)]
    assert [n for piece in made for n in piece] == [n for batch in batches for n in batch["n"].to_pylist()]
    lengths = [sum(n_bytes[at] for at in set(piece)) for piece in made]
    assert all(max(left, right) >= asked for left, right in itertools.pairwise(lengths))
    assert all(length < asked + max(n_bytes) for length in lengths)


@given(st.lists(st.integers(0, 100), max_size=8), st.integers(1, 100))
def test_partitions_of_several_small_shards_alone_are_compacted(sizes: list[int], large: int) -> None:
    is_small = bool(sizes) and sum(sizes) / len(sizes) < large
    assert is_worthwhile(sizes, large) == (is_small and len(sizes) > 1)


async def test_a_partition_of_large_shards_is_not_compacted(folder: RunFolder, rows: RowMaker) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        await append_one_by_one(writer, rows, ["a", "b"])
        before = shards(folder)
        assert not await writer.compact("rollouts/step=000000", large_bytes=1)
    assert shards(folder) == before


async def test_a_duplicate_trajectory_and_a_damaged_shard_stop_a_compaction_and_are_named(
    folder: RunFolder, rows: RowMaker
) -> None:
    files = open_files(folder)
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        await append_one_by_one(writer, rows, ["a", "b", "a"])
        before = shards(folder)
        with pytest.raises(ShardError, match="rollouts/step=000000: 3 rows of 2 trajectories"):
            await writer.compact("rollouts/step=000000", ANY_SIZE)
        whole = read_text(files, before[1])
        flipped = whole.replace(b"trajectory", b"trajectorY", 1)
        for damaged in (whole[:-20], flipped, whole.replace(np.float32(1.0).tobytes(), b"\0\0\0\0", 1)):
            await asyncio.to_thread(publish_text, files, before[1], damaged)
            with pytest.raises(ShardError, match=before[1]):
                await writer.compact("rollouts/step=000000", ANY_SIZE)
    assert shards(folder) == before
    assert not list(folder.tmp.iterdir())


async def test_steps_below_a_checkpoint_are_compacted_during_the_run_and_all_steps_at_its_end(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with (
        RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer,
        Compactor(open_files(folder), writer, SOON, never) as compactor,
    ):
        for step in range(4):
            await append_one_by_one(writer, rows, [f"{step}.{n}" for n in range(3)], step)
        compactor.begin(2)
        await compactor.settle()
        assert [len(read_shards(folder, step)) for step in range(4)] == [1, 1, 3, 3]
        compactor.begin(3)
        compactor.begin(3)
        await compactor.settle()
        assert [len(read_shards(folder, step)) for step in range(4)] == [1, 1, 1, 3]
        await append_one_by_one(writer, rows, ["1.3"], 1)
        await compactor.finish()
        assert [len(read_shards(folder, step)) for step in range(4)] == [1, 1, 1, 1]
    assert ids_of(folder) == [f"{s}.{n}" for s in range(4) for n in range(4) if n < 3 or s == 1]


def read_shards(folder: RunFolder, step: int) -> list[str]:
    return open_files(folder).keys(f"rollouts/step={step:06d}/*.arrow")


async def test_a_resumed_run_removes_the_superseded_shards_of_an_ended_process(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with (
        RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer,
        Compactor(open_files(folder), writer, StoreConfig(compaction_grace_s=3600.0), never) as compactor,
    ):
        await append_one_by_one(writer, rows, ["a", "b"])
        compactor.begin(1)
        await append_one_by_one(writer, rows, ["c", "d"], step=1)
        while not list_superseded_shards(shards(folder)):
            await append_one_by_one(writer, rows, [f"c{len(shards(folder))}"], step=1)
    assert len(read_shards(folder, 0)) == 3
    async with (
        RunWriter(open_files(folder), epoch=2, flush_s=0.0) as writer,
        Compactor(open_files(folder), writer, SOON, never) as compactor,
    ):
        compactor.begin(1)
        await compactor.settle()
        assert len(read_shards(folder, 0)) == 1
        assert ids_of(folder, step=0) == ["a", "b"]


async def test_shards_whose_replacement_is_damaged_are_kept_and_the_damaged_one_is_named(
    folder: RunFolder, rows: RowMaker
) -> None:
    files, messages = open_files(folder), list[str]()
    async with RunWriter(files, epoch=1, flush_s=0.0) as writer:
        for step in (0, 1):
            await append_one_by_one(writer, rows, ["a", "b"], step)
            await writer.compact(f"rollouts/step={step:06d}", ANY_SIZE)
    (damaged,) = current_shards(read_shards(folder, 0))
    publish_text(files, damaged, read_text(files, damaged)[:-1] + b"x")
    async with (
        RunWriter(files, epoch=2, flush_s=0.0) as writer,
        Compactor(files, writer, SOON, messages.append) as compactor,
    ):
        await compactor.finish()
    assert compactor.n_failed == len(messages) == 1
    assert damaged in messages[0]
    assert [len(files.keys(f"rollouts/step={step:06d}/*.arrow")) for step in (0, 1)] == [3, 1]


async def test_a_failed_compaction_is_reported_and_the_run_continues(
    folder: RunFolder, rows: RowMaker
) -> None:
    messages: list[str] = []
    async with (
        RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer,
        Compactor(open_files(folder), writer, SOON, messages.append) as compactor,
    ):
        await append_one_by_one(writer, rows, ["a", "a"])
        await append_one_by_one(writer, rows, ["b", "c"], step=1)
        await compactor.finish()
        assert compactor.n_failed == len(messages) == 1
        assert "2 rows of 1 trajectories" in messages[0]
    assert (len(read_shards(folder, 0)), len(read_shards(folder, 1))) == (2, 1)


async def test_superseded_shards_stay_until_the_end_unless_they_are_to_go_after_the_grace(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with (
        RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer,
        Compactor(open_files(folder), writer, StoreConfig(compaction_grace_s=0.1), never) as compactor,
    ):
        await append_one_by_one(writer, rows, ["a", "b"])
        compactor.begin(1)
        await compactor.settle()
        assert [len(found) for found in (shards(folder), list_superseded_shards(shards(folder)))] == [3, 2]
        await compactor.finish()
        assert len(shards(folder)) == 1


async def test_without_compaction_shards_stay(folder: RunFolder, rows: RowMaker) -> None:
    async with (
        RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer,
        Compactor(open_files(folder), writer, StoreConfig(compact="never"), never) as compactor,
    ):
        await append_one_by_one(writer, rows, ["a", "b"])
        compactor.begin(1)
        await compactor.finish()
    assert len(shards(folder)) == 2


async def test_plain_scans_see_every_row_once_by_its_id_while_superseded_shards_are_there(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        await append_one_by_one(writer, rows, ["a", "b"])
        await writer.compact("rollouts/step=000000", ANY_SIZE)
        options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]} if not folder.is_local else None
        scanned = pl.scan_ipc(
            folder.path("rollouts/**/*.arrow"), hive_partitioning=True, storage_options=options
        )
        assert scanned.collect().height == 4
        assert sorted(scanned.unique("trajectory_id").collect()["trajectory_id"]) == ["a", "b"]
