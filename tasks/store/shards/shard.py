"""One shard: checks rows, joins small batches, and writes and publishes them as an Arrow IPC file."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from rollmill.tasks.errors import SchemaError
from rollmill.tasks.store.filesystem import Files
from rollmill.tasks.store.folders import Partition
from rollmill.tasks.store.schemas import check_nulls, dataset_schema, schema_like
from rollmill.tasks.store.shards.integrity import make_seal, shard_digest
from rollmill.tasks.store.shards.inventory import ShardEvent
from rollmill.tasks.store.shards.shard_names import ShardName

# Batches of at least this size (4 MiB) are written as they are; smaller ones are joined until they have it.
JOINED_BYTES = 1 << 22

# Space in a small shard for all but its rows (1 MiB): its schema, twice, and its hashes.
OVERHEAD_BYTES = 1 << 20

_PARTITION_COLUMNS = {"step": "step", "version": "policy_version", "epoch": "epoch"}


def check_rows(dataset: str, rows: pa.RecordBatch, partition: Partition) -> None:
    """Raise SchemaError unless rows have the schema of a data set, no null and values of the partition."""
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

    Its last batch, of zero rows, carries the hashes that show damage; see rollmill.tasks.store.shards.integrity. Returns `name` with
    the shard's digest.
    """
    batches = join_batches(appended, JOINED_BYTES)
    first, second = next(batches, None), next(batches, None)
    schema = dataset_schema(dataset) if first is None else schema_like(dataset, first.schema)
    there = [each for each in (first, second) if each is not None]
    if len(there) == 1 and _batch_bytes(there[0]) < JOINED_BYTES:
        return str(replace(name, digest=_write_at_once(path, schema, there[0])))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in chain(there, batches):
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        if not sink.tell():
            # The schema goes with the first batch.
            writer.write_batch(_empty_batch(schema))
        # The hashes are of the bytes in the file so far, which the last batch then carries.
        with pa.memory_map(str(path)) as written:
            sealed = make_seal(memoryview(written.read_buffer(sink.tell())))
        writer.write_batch(_empty_batch(schema), custom_metadata=sealed)
    with pa.memory_map(str(path)) as written:
        digest = shard_digest(memoryview(written.read_buffer()))
    return str(replace(name, digest=digest))


def _write_at_once(path: Path, schema: pa.Schema, rows: pa.RecordBatch) -> str:
    """Write a small shard in one piece, made in memory; returns its digest."""
    content = np.empty(_batch_bytes(rows) + OVERHEAD_BYTES, np.uint8).data
    with pa.FixedSizeBufferWriter(pa.py_buffer(content)) as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(rows.replace_schema_metadata(schema.metadata))
            writer.write_batch(_empty_batch(schema), custom_metadata=make_seal(content[: sink.tell()]))
        content = content[: sink.tell()]
    path.write_bytes(content)
    return shard_digest(content)


@lru_cache
def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


def join_batches(batches: Iterable[pa.RecordBatch], piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in the same order, in batches of `piece_bytes` or little more; batches are never split.

    Example: with 10 bytes a piece, batches of 4, 4, 4, 20 and 1 bytes become pieces of 12, 20 and 1.
    """
    gathered: list[pa.RecordBatch] = []
    n_bytes = 0
    for batch in batches:
        size = _batch_bytes(batch)
        if size >= piece_bytes and gathered:
            yield pa.concat_batches(gathered)
            gathered, n_bytes = [], 0
        gathered.append(batch)
        n_bytes += size
        if n_bytes >= piece_bytes:
            yield pa.concat_batches(gathered) if len(gathered) > 1 else batch
            gathered, n_bytes = [], 0
    if gathered:
        yield pa.concat_batches(gathered)


def _batch_bytes(batch: pa.RecordBatch) -> int:
    """Compute the size in bytes of a record batch in a shard; ten times faster than `nbytes`."""
    return int(pa.ipc.get_record_batch_size(batch))


def publish_shard(files: Files, folder: str, write: Callable[[Path], tuple[str, int]]) -> ShardEvent:
    """Publish the shard that `write` makes in a partition's folder; `write` returns its name and its number of rows."""
    rows = size = 0

    def write_measured(path: Path) -> str:
        nonlocal rows, size
        name, rows = write(path)
        size = path.stat().st_size
        return name

    return ShardEvent(files.publish(folder, write_measured), "written", rows, size)
