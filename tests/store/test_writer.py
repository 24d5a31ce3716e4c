"""The writer: group commit, acknowledgements, failures, the end."""

import asyncio
import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from rollmill.tasks.errors import SchemaError, StoreError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.shards.shard_names import ShardName
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]
REPOSITORY = Path(__file__).parents[2]
ON_A_DISK = pytest.mark.parametrize("root", ["local"], indirect=True)


class GatedFiles:
    """Local files of which each waits to be published until the gate is opened."""

    def __init__(self, folder: RunFolder) -> None:
        self._files = open_files(folder)
        self.gate = threading.Event()
        self.began = threading.Event()

    def publish(self, folder: str, write: Callable[[Path], str]) -> str:
        self.began.set()
        assert self.gate.wait(30)
        return self._files.publish(folder, write)

    def keys(self, pattern: str) -> list[str]:
        return self._files.keys(pattern)

    def open(self, key: str) -> pa.NativeFile:
        return self._files.open(key)

    def remove(self, keys: Iterable[str]) -> None:
        self._files.remove(keys)

    async def until_committing(self) -> None:
        await asyncio.to_thread(self.began.wait, 30)


def shards(folder: RunFolder) -> list[str]:
    """Without their digests."""
    return [key.rpartition("-")[0] for key in open_files(folder).keys("**/*.arrow")]


def groups_of(folder: RunFolder, dataset: str = "rollouts", **partition: int) -> list[int]:
    return list(read(folder, dataset, ["group"], **partition)["group"].to_pylist())


async def test_acknowledged_rows_are_in_the_data_set(folder: RunFolder, rows: RowMaker) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        await writer.append("rollouts", rows("rollouts", 2, step=3, group=[7, 8]), step=3)
        assert groups_of(folder, step=3) == [7, 8]
    assert shards(folder) == ["rollouts/step=000003/000001-000000"]


async def test_a_batch_of_zero_rows_is_stored(folder: RunFolder, rows: RowMaker) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        await writer.append("batches", rows("batches", 0), step=3)
    assert shards(folder) == ["batches/step=000003/000001-000000"]
    assert read(folder, "batches").num_rows == 0


async def test_rows_that_arrive_during_a_commit_become_one_shard_for_each_partition(
    folder: RunFolder, rows: RowMaker
) -> None:
    files = GatedFiles(folder)
    async with RunWriter(files, epoch=1, flush_s=0.0) as writer:
        first = writer.append("rollouts", rows("rollouts", step=0, group=0), step=0)
        await files.until_committing()
        later = [writer.append("rollouts", rows("rollouts", step=0, group=n), step=0) for n in (1, 2, 3)]
        later.append(writer.append("rollouts", rows("rollouts", step=1, group=9), step=1))
        later.append(writer.append("groups", rows("groups", step=0, group=4), step=0))
        assert not first.done()
        files.gate.set()
        await asyncio.gather(first, *later)
    assert len(shards(folder)) == 4
    assert groups_of(folder, step=0) == [0, 1, 2, 3]


async def test_a_commit_waits_for_rows_that_are_expected_and_a_flush_cuts_the_wait_short(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with asyncio.timeout(30), RunWriter(open_files(folder), epoch=1, flush_s=3600.0) as writer:
        with writer.expect_rows():
            waiting = [writer.append("rollouts", rows("rollouts", step=0, group=n), step=0) for n in range(5)]
            await asyncio.sleep(0.05)
            assert shards(folder) == []
            await writer.flush()
        assert all(each.done() for each in waiting)
        assert len(shards(folder)) == 1
        writer.append("rollouts", rows("rollouts", step=0, group=5), step=0)
    assert groups_of(folder) == [0, 1, 2, 3, 4, 5]


async def test_a_commit_begins_at_once_when_no_more_rows_are_expected(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with asyncio.timeout(30), RunWriter(open_files(folder), epoch=1, flush_s=3600.0) as writer:
        await writer.append("rollouts", rows("rollouts", step=0, group=0), step=0)
        with writer.expect_rows():
            with writer.expect_rows():
                waiting = writer.append("rollouts", rows("rollouts", step=0, group=1), step=0)
            await asyncio.sleep(0.05)
            assert not waiting.done()
        await waiting
        with suppress(ZeroDivisionError), writer.expect_rows():
            waiting = writer.append("rollouts", rows("rollouts", step=0, group=2), step=0)
            raise ZeroDivisionError
        await waiting
    assert len(shards(folder)) == 3


async def test_rows_that_a_step_waits_for_are_stored_at_once_and_with_what_waited(
    folder: RunFolder, rows: RowMaker
) -> None:
    files = GatedFiles(folder)
    async with asyncio.timeout(30), RunWriter(files, epoch=1, flush_s=3600.0) as writer:
        with writer.expect_rows():
            waited = writer.append("rollouts", rows("rollouts", step=0, group=0), step=0)
            first = asyncio.ensure_future(writer.store("plans", rows("plans", step=0), step=0))
            await files.until_committing()
            second = asyncio.ensure_future(writer.store("batches", rows("batches", 0), step=0))
            await asyncio.sleep(0)
            assert not first.done()
            files.gate.set()
            await asyncio.gather(waited, first, second)
            later = writer.append("rollouts", rows("rollouts", step=0, group=1), step=0)
            await asyncio.sleep(0.05)
            assert not later.done()
    assert groups_of(folder) == [0, 1]


async def test_cancelling_a_waiting_caller_does_not_remove_its_rows(
    folder: RunFolder, rows: RowMaker
) -> None:
    files = GatedFiles(folder)
    async with RunWriter(files, epoch=1, flush_s=0.0) as writer:
        futures = [writer.append("rollouts", rows("rollouts", step=0, group=n), step=0) for n in (0, 1)]
        await files.until_committing()
        futures[0].cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(futures[1], 0.01)
        files.gate.set()
        await writer.flush()
        assert groups_of(folder) == [0, 1]


async def test_leaving_by_an_error_stores_everything_and_keeps_the_error(
    folder: RunFolder, rows: RowMaker
) -> None:
    async def work() -> None:
        async with RunWriter(open_files(folder), epoch=1, flush_s=3600.0) as writer:
            writer.append("rollouts", rows("rollouts", step=0), step=0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert read(folder, "rollouts").num_rows == 1


async def test_a_second_cancellation_on_the_way_out_loses_nothing(folder: RunFolder, rows: RowMaker) -> None:
    files = GatedFiles(folder)
    is_open = asyncio.Event()

    async def work() -> None:
        async with RunWriter(files, epoch=1, flush_s=0.0) as writer:
            writer.append("rollouts", rows("rollouts", step=0, group=0), step=0)
            await files.until_committing()
            writer.append("rollouts", rows("rollouts", step=0, group=1), step=0)
            is_open.set()
            await asyncio.sleep(3600)

    task = asyncio.create_task(work())
    await is_open.wait()
    task.cancel()
    await asyncio.sleep(0.01)
    threading.Timer(0.1, files.gate.set).start()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert groups_of(folder) == [0, 1]


@ON_A_DISK
async def test_a_partition_that_cannot_be_written_fails_only_its_own_rows(
    folder: RunFolder, rows: RowMaker
) -> None:
    (folder.local / "scores").write_text("a file where a folder should be")
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        good = writer.append("rollouts", rows("rollouts", step=0), step=0)
        bad = writer.append("scores", rows("scores", step=0), scorer="addition@1", step=0)
        also_good = writer.append("groups", rows("groups", step=0), step=0)
        await asyncio.gather(good, also_good)
        with pytest.raises(
            StoreError, match=r"cannot write .*scores/scorer=addition@1/step=000000: Not a directory"
        ):
            await bad
        await writer.append("rollouts", rows("rollouts", step=0), step=0)
    assert read(folder, "rollouts").num_rows == 2
    assert list(folder.tmp.iterdir()) == []


@ON_A_DISK
async def test_rows_that_nobody_waits_for_and_that_cannot_be_stored_fail_the_exit(
    folder: RunFolder, rows: RowMaker
) -> None:
    (folder.local / "rollouts").write_text("a file where a folder should be")
    with pytest.raises(StoreError, match="Not a directory"):
        async with RunWriter(open_files(folder), epoch=1, flush_s=3600.0) as writer:
            acknowledgement = writer.append("rollouts", rows("rollouts", step=0), step=0)
    assert isinstance(acknowledgement.exception(), StoreError)


@ON_A_DISK
def test_a_full_disk_is_an_error_that_names_path_and_reason_and_leaves_nothing(folder: RunFolder) -> None:
    def fill(path: Path) -> str:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match=r"cannot write .*/run/rollouts: No space left on device"):
        open_files(folder).publish("rollouts", fill)
    assert list(folder.local.rglob("*")) == [folder.tmp]


@ON_A_DISK
def test_a_file_beyond_the_systems_size_limit_is_a_space_error_too(folder: RunFolder) -> None:
    program = """
import resource, sys
from pathlib import Path
from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.filesystem import LocalFiles, publish_text

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
root = Path(sys.argv[1])
try:
    publish_text(LocalFiles(root, root / ".tmp"), "rollouts/a.arrow", bytes(100_000))
except StoreError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(folder.local)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout == f"cannot write {folder.local}/rollouts: File too large\n"
    assert list(folder.local.rglob("*")) == [folder.tmp]


async def test_rows_of_another_schema_are_refused_when_they_are_appended(
    folder: RunFolder, rows: RowMaker
) -> None:
    made = rows("rollouts", step=0)
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        with pytest.raises(SchemaError, match="rollouts: rows do not fit the schema at token_ids"):
            writer.append("rollouts", made.drop_columns(["token_ids"]), step=0)
        with pytest.raises(SchemaError, match="reward_bonus"):
            writer.append("rollouts", made.append_column("reward_bonus", pa.array([1.0])), step=0)
        nulls = made.set_column(
            made.schema.get_field_index("group"), made.schema.field("group"), pa.nulls(1, pa.int64())
        )
        with pytest.raises(SchemaError, match=r"rollouts\.group: 1 of 1 values are null"):
            writer.append("rollouts", nulls, step=0)
    assert shards(folder) == []


async def test_rows_of_another_partition_are_refused(folder: RunFolder, rows: RowMaker) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        with pytest.raises(SchemaError, match=r"rollouts\.step is 3 to 4 in rows of step=4"):
            writer.append("rollouts", rows("rollouts", 2, step=[3, 4]), step=4)
        with pytest.raises(SchemaError, match=r"evaluations\.policy_version is 1 to 1 in rows of version=2"):
            writer.append("evaluations", rows("evaluations", policy_version=1), version=2)


async def test_a_closed_writer_refuses_rows(folder: RunFolder, rows: RowMaker) -> None:
    writer = RunWriter(open_files(folder), epoch=1, flush_s=0.0)
    with pytest.raises(StoreError, match="not open; 1 rows of rollouts were not stored"):
        writer.append("rollouts", rows("rollouts", step=0), step=0)
    async with writer:
        pass
    with pytest.raises(StoreError, match="not open"):
        writer.append("rollouts", rows("rollouts", step=0), step=0)


async def test_every_data_set_is_read_back_as_it_was_appended(folder: RunFolder, rows: RowMaker) -> None:
    partitions: dict[str, dict[str, int | str]] = {
        "scores": {"scorer": "addition@1", "step": 1},
        "evaluations": {"version": 1},
    }
    datasets = ["plans", "rollouts", "routing", "groups", "batches", "annotations", "metrics", *partitions]
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for dataset in datasets:
            writer.append(dataset, rows(dataset, 3), **partitions.get(dataset, {"step": 1}))
    for dataset in datasets:
        assert read(folder, dataset).equals(pa.table(rows(dataset, 3)), check_metadata=True), dataset


@ON_A_DISK
async def test_no_score_is_stored_without_its_rollout(folder: RunFolder, rows: RowMaker) -> None:
    score = {"scorer": "addition@1", "step": 0}
    async with RunWriter(open_files(folder), 1, 0.0) as writer:
        scores = writer.append("scores", rows("scores", step=0), **score)
        rollouts = writer.append("rollouts", rows("rollouts", step=0), step=0)
        await asyncio.gather(scores, rollouts)
        (first,), (second,) = (
            open_files(folder).keys(f"{name}/**/*.arrow") for name in ("rollouts", "scores")
        )
        assert ShardName.of(first) < ShardName.of(second)
        (folder.local / "rollouts" / "step=000001").write_text("in the way")
        scores = writer.append("scores", rows("scores", step=1), scorer="addition@1", step=1)
        rollouts = writer.append("rollouts", rows("rollouts", step=1), step=1)
        for lost in (scores, rollouts):
            with pytest.raises(StoreError, match="rollouts/step=000001"):
                await lost
        # Later too, when there is room again: a resumed run would look for their rollouts.
        (folder.local / "rollouts" / "step=000001").unlink()
        with pytest.raises(StoreError, match="rollouts/step=000001"):
            await writer.append("scores", rows("scores", step=1), scorer="addition@1", step=1)
        await writer.append("scores", rows("scores", step=0), **score)
    assert not open_files(folder).keys("scores/scorer=addition@1/step=000001/*")
