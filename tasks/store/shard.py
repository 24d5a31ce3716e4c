"""One shard: rows checked, put together, written as an Arrow IPC file."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tasks.errors import SchemaError
from tasks.store.integrity import digest_of, seal
from tasks.store.layout import Partition
from tasks.store.names import ShardName
from tasks.store.schemas import schema_like, schema_of

COPIED_BYTES = 1 << 22
"""Rows handed over in larger pieces than this (4 MiB) are written as they are; smaller ones are joined first."""

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
    for field, column in zip(schema, rows.columns, strict=True):
        if column.null_count and not field.nullable:
            raise SchemaError(f"{dataset}.{field.name}: {column.null_count} of {len(column)} values are null")
    for key, name in _PARTITION_COLUMNS.items():
        if key in partition and rows.num_rows:
            ends = pc.min_max(rows.column(name)).as_py()
            if ends != {"min": partition[key], "max": partition[key]}:
                raise SchemaError(
                    f"{dataset}.{name} is {ends['min']} to {ends['max']} in rows of {key}={partition[key]}"
                )


def write_shard(path: Path, name: ShardName, dataset: str, appended: Iterable[pa.RecordBatch]) -> str:
    """Write rows as one Arrow IPC file, uncompressed, so that a reader maps columns instead of copying them.

    Its last batch, of zero rows, carries the hashes that show damage; see tasks.store.integrity. Returns `name` with
    the shard's digest.
    """
    batches = joined_batches(appended)
    first = next(batches, None)
    schema = schema_of(dataset) if first is None else schema_like(dataset, first.schema)
    no_rows = pa.RecordBatch.from_pylist([], schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in chain([] if first is None else [first], batches):
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        if not sink.tell():
            writer.write_batch(no_rows)  # the schema goes with the first batch
        with pa.memory_map(str(path)) as written:
            sealed = seal(memoryview(written.read_buffer(sink.tell())))
        writer.write_batch(no_rows, custom_metadata=sealed)
    with pa.memory_map(str(path)) as written:
        digest = digest_of(memoryview(written.read_buffer()))
    return str(replace(name, digest=digest))


def joined_batches(appended: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, in few pieces.

    Example: pieces of 1, 1, 1 and, too large to copy, 500 rows come out as pieces of 3 and 500.
    """
    small: list[pa.RecordBatch] = []
    for batch in appended:
        if batch.nbytes < COPIED_BYTES:
            small.append(batch)
            continue
        if small:
            yield pa.concat_batches(small)
            small = []
        yield batch
    if small:
        yield pa.concat_batches(small)
