"""Every value of every column comes back bit for bit."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import PARTITION_KEYS, RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.schemas import SCHEMAS, make_batch
from rollmill.tasks.store.shards.writer import RunWriter

N = 4
NAN_PAYLOADS_64 = np.array(
    [0x7FF8000000000001, 0xFFF800000000BEEF, 0x7FF0000000000000, 0x8000000000000000], "<u8"
)
NAN_PAYLOADS_32 = np.array([0x7FC00001, 0xFFC0BEEF, 0x7F800000, 0x80000000], "<u4")
PLACES = {"step": 3, "epoch": 3, "policy_version": 3}
"""Columns that say the partition."""


def extremes(kind: pa.DataType) -> list[object] | pa.Array:
    """Four values of a type that a careless store would change."""
    if pa.types.is_large_list(kind):
        inner = extremes(kind.value_type)
        values = inner if isinstance(inner, pa.Array) else pa.array(inner, kind.value_type)
        return pa.LargeListArray.from_arrays(pa.array([0, 0, 3, 4, 4], pa.int64()), values, type=kind)
    if pa.types.is_float64(kind):
        return pa.array(NAN_PAYLOADS_64.view("<f8"))
    if pa.types.is_float32(kind):
        return pa.array(NAN_PAYLOADS_32.view("<f4"))
    if pa.types.is_boolean(kind):
        return [True, False, False, True]
    if pa.types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        return [int(info.max), int(info.min), 0, -1]
    if pa.types.is_timestamp(kind):
        return [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)] * 2
    if pa.types.is_large_binary(kind):
        return [b"", b"\x00\xff", bytes(range(256)), b"ARROW1"]
    return ["", "\x00 \U0001f600 é é", '{"a": "\\n"}', "ARROW1" * 1000]


def bits(column: pa.ChunkedArray) -> object:
    """A column's values such that two NaN of other bits differ."""
    kind = column.type
    if pa.types.is_large_list(kind):
        joined = column.combine_chunks()
        return joined.value_lengths().to_pylist(), bits(pa.chunked_array([joined.flatten()]))
    if pa.types.is_floating(kind):
        return column.to_numpy().tobytes()
    return column.cast(pa.int64()).to_pylist() if pa.types.is_timestamp(kind) else column.to_pylist()


@pytest.mark.parametrize("dataset", SCHEMAS)
async def test_every_column_is_read_back_bit_for_bit(folder: RunFolder, dataset: str) -> None:
    schema = SCHEMAS[dataset]
    values = {field.name: extremes(field.type) for field in schema}
    values |= {name: [place] * N for name, place in PLACES.items() if name in schema.names}
    rows = make_batch(dataset, values)
    key = PARTITION_KEYS[dataset][-1]
    outer: dict[str, str] = {"scorer": "a@1", "policy": "trainer"}
    partition: dict[str, int | str] = {key: 3}
    partition |= {each: outer[each] for each in PARTITION_KEYS[dataset][:-1] if each in outer}
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        await writer.append(dataset, rows.slice(0, 3), **partition)
        await writer.append(dataset, rows.slice(3), **partition)
    stored = read(folder, dataset, **partition)
    assert stored.schema.equals(schema, check_metadata=True)
    for name in schema.names:
        assert bits(stored[name]) == bits(pa.chunked_array([rows.column(name)])), name
