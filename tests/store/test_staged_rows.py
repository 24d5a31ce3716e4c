"""Rows that another process has made reach the data set once, whenever a process dies."""

from collections.abc import AsyncIterator, Callable
from dataclasses import asdict

import pyarrow as pa
import pytest

from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.shards.writer import RunWriter
from rollmill.tasks.store.staged_rows import StagedRows, ingest_rows, remove_staged_rows, stage_rows

RowMaker = Callable[..., pa.RecordBatch]
IDS = ["a", "b", "c"]


@pytest.fixture
async def writer(folder: RunFolder) -> AsyncIterator[RunWriter]:
    async with RunWriter(open_files(folder), 1, 0.0) as opened:
        yield opened


def stage(folder: RunFolder, rows: RowMaker, ids: list[str] = IDS) -> StagedRows:
    made = rows("logprobs", len(ids), step=3, trajectory_id=ids)
    return stage_rows(folder, "logprobs", made, "name", policy="trainer", step=3)


def list_stored(folder: RunFolder) -> list[str]:
    found: list[str] = read(folder, "logprobs", policy="trainer", step=3)["trajectory_id"].to_pylist()
    return sorted(found)


async def test_rows_that_were_staged_twice_are_stored_once(
    folder: RunFolder, writer: RunWriter, rows: RowMaker
) -> None:
    """As when a process dies between storing them and removing the file, and they are made again."""
    files = open_files(folder)
    assert await ingest_rows(folder, files, writer, stage(folder, rows, IDS[:2])) == 2
    again = stage(folder, rows)
    assert await ingest_rows(folder, files, writer, again) == 1
    assert list_stored(folder) == IDS
    assert not files.keys(".tmp/staged/*")


async def test_rows_that_are_stored_need_no_file_any_more(
    folder: RunFolder, writer: RunWriter, rows: RowMaker
) -> None:
    """As when a response that names a staged file is received twice."""
    fields = asdict(stage(folder, rows))
    for n_new in (len(IDS), 0):
        assert await ingest_rows(folder, open_files(folder), writer, StagedRows.parse(fields)) == n_new
    assert list_stored(folder) == IDS


async def test_rows_that_are_neither_there_nor_stored_are_an_error(
    folder: RunFolder, writer: RunWriter, rows: RowMaker
) -> None:
    staged = stage(folder, rows)
    remove_staged_rows(open_files(folder))
    with pytest.raises(StoreError, match=r"name\.arrow, which cannot be read"):
        await ingest_rows(folder, open_files(folder), writer, staged)
