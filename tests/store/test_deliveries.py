"""Rows that another process has made reach the data set once, whenever a process dies."""

from collections.abc import AsyncIterator, Callable
from dataclasses import asdict

import pyarrow as pa
import pytest

from tasks.errors import StoreError
from tasks.store.deliveries import Delivery, clear, hand_over, take_in
from tasks.store.filesystem import files_of
from tasks.store.layout import RunFolder
from tasks.store.reader import read
from tasks.store.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]
IDS = ["a", "b", "c"]


@pytest.fixture
async def writer(folder: RunFolder) -> AsyncIterator[RunWriter]:
    async with RunWriter(files_of(folder), 1, 0.0) as opened:
        yield opened


def handed_over(folder: RunFolder, rows: RowMaker, ids: list[str] = IDS) -> Delivery:
    made = rows("logprobs", len(ids), step=3, trajectory_id=ids)
    return hand_over(folder, "logprobs", made, "name", policy="trainer", step=3)


def stored(folder: RunFolder) -> list[str]:
    found: list[str] = read(folder, "logprobs", policy="trainer", step=3)["trajectory_id"].to_pylist()
    return sorted(found)


async def test_rows_that_were_handed_over_twice_are_stored_once(
    folder: RunFolder, writer: RunWriter, rows: RowMaker
) -> None:
    """As when a process dies between storing them and removing the file, and they are made again."""
    files = files_of(folder)
    assert await take_in(folder, files, writer, handed_over(folder, rows, IDS[:2])) == 2
    again = handed_over(folder, rows)
    assert await take_in(folder, files, writer, again) == 1
    assert stored(folder) == IDS
    assert not files.keys(".tmp/deliveries/*")


async def test_rows_that_are_stored_need_no_file_any_more(
    folder: RunFolder, writer: RunWriter, rows: RowMaker
) -> None:
    """As when a delivery is told of again, by an answer that came twice."""
    told = asdict(handed_over(folder, rows))
    for n_new in (len(IDS), 0):
        assert await take_in(folder, files_of(folder), writer, Delivery.parse(told)) == n_new
    assert stored(folder) == IDS


async def test_rows_that_are_neither_there_nor_stored_are_an_error(
    folder: RunFolder, writer: RunWriter, rows: RowMaker
) -> None:
    delivery = handed_over(folder, rows)
    clear(files_of(folder))
    with pytest.raises(StoreError, match=r"name\.arrow, and cannot be read"):
        await take_in(folder, files_of(folder), writer, delivery)
