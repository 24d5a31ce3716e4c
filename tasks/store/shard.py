"""One shard: rows checked, put together, written as an Arrow IPC file."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.errors import SchemaError
from tasks.store.integrity import digest_of, seal
from tasks.store.layout import Partition
from tasks.store.names import ShardName
from tasks.store.schemas import check_nulls, schema_like, schema_of

COPIED_BYTES = 1 << 22
"""Rows handed over in larger pieces than this (4 MiB) are written as they are; smaller ones are joined first."""

BESIDE_ROWS_BYTES = 1 << 20
"""Room in a small shard for all but its rows (1 MiB): its schema, twice, and its hashes."""

_PARTITION_COLUMNS = {"step": "step", "version": "policy_version", "epoch": "epoch"}


def check_rows(dataset: str, rows: pa.RecordBatch, partition: Partition) -> None:
    """Check that rows may be stored in a partition.

    Raises:
        SchemaError: their schema is not the data set's, a value is null, or a row belongs to another partition.
    """
    schema = schema_like(dataset, rows.schema)
    if not rows.schema.equals(schema):
        unlike = [field.name for field in schema if field not in list(rows.schema)]
        unknown = [name for name in rows.schema.names if name not in schema.names]
        raise SchemaError(
            f"{dataset}: rows do not fit the schema at {', '.join(unlike + unknown) or 'their order'}"
        )
    check_nulls(dataset, rows)
    for key, name in _PARTITION_COLUMNS.items():
        if key in partition and rows.num_rows:
            values = rows.column(name).to_numpy()
            if (values != partition[key]).any():
                raise SchemaError(
                    f"{dataset}.{name} is {values.min()} to {values.max()} in rows of {key}={partition[key]}"
                )


def write_shard(path: Path, name: ShardName, dataset: str, appended: Iterable[pa.RecordBatch]) -> str:
    """Write rows as one Arrow IPC file, uncompressed, so that a reader maps columns instead of copying them.

    Its last batch, of zero rows, carries the hashes that show damage; see tasks.store.integrity. Returns `name` with
    the shard's digest.
    """
    batches = joined_batches(appended)
    first, second = next(batches, None), next(batches, None)
    schema = schema_of(dataset) if first is None else schema_like(dataset, first.schema)
    there = [each for each in (first, second) if each is not None]
    if len(there) == 1 and _bytes_of(there[0]) < COPIED_BYTES:
        return str(replace(name, digest=_write_at_once(path, schema, there[0])))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in chain(there, batches):
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        if not sink.tell():
            writer.write_batch(_no_rows(schema))  # the schema goes with the first batch
        with pa.memory_map(str(path)) as written:
            sealed = seal(memoryview(written.read_buffer(sink.tell())))
        writer.write_batch(_no_rows(schema), custom_metadata=sealed)
    with pa.memory_map(str(path)) as written:
        digest = digest_of(memoryview(written.read_buffer()))
    return str(replace(name, digest=digest))


def _write_at_once(path: Path, schema: pa.Schema, rows: pa.RecordBatch) -> str:
    """The same for a small shard, made in memory and written in one piece; returns its digest."""
    content = np.empty(_bytes_of(rows) + BESIDE_ROWS_BYTES, np.uint8).data
    with pa.FixedSizeBufferWriter(pa.py_buffer(content)) as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(rows.replace_schema_metadata(schema.metadata))
            writer.write_batch(_no_rows(schema), custom_metadata=seal(content[: sink.tell()]))
        content = content[: sink.tell()]
    path.write_bytes(content)
    return digest_of(content)


@lru_cache
def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


def joined_batches(appended: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, in few pieces.

    Example: pieces of 1, 1, 1 and, too large to copy, 500 rows come out as pieces of 3 and 500.
    """
    small: list[pa.RecordBatch] = []
    for batch in appended:
        if _bytes_of(batch) < COPIED_BYTES:
            small.append(batch)
            continue
        if small:
            yield pa.concat_batches(small)
            small = []
        yield batch
    if small:
        yield pa.concat_batches(small)


def _bytes_of(batch: pa.RecordBatch) -> int:
    """Its size in a shard; Arrow tells it in a tenth of the time that `nbytes` takes."""
    return int(pa.ipc.get_record_batch_size(batch))
