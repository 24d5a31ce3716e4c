"""Compaction: the small shards of a partition become one, which takes their place the moment it appears.

What it takes the place of follows from its name, see tasks.store.names: every shard of the partition whose (epoch,
number) is smaller, and it holds the rows of exactly those. So a kill leaves the small shards, or the compacted one
beside them, and readers that go by names see every row once all the while.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tasks.errors import ShardError
from tasks.store.filesystem import Files
from tasks.store.integrity import open_shard
from tasks.store.inventory import Note
from tasks.store.names import ShardName, current
from tasks.store.schemas import schema_like
from tasks.store.shard import write_shard

PIECE_BYTES = 1 << 24
"""Rows are copied in pieces of about this size (16 MiB), which bounds the memory that a compaction takes."""

_ID = "trajectory_id"
_REPEATING = {"batches", "routing", "states"}
"""Data sets that may hold a trajectory twice; the last two after a kill, see tasks.store.routing."""


def partitions(keys: Iterable[str]) -> dict[str, list[str]]:
    """The shards to read of each partition, in order.

    Example: {"plans/step=000001": ["plans/step=000001/000001-000000-9f86d081884c7d65.arrow"]}
    """
    found: dict[str, list[str]] = defaultdict(list)
    for key in current(keys):
        found[key.rpartition("/")[0]].append(key)
    return dict(found)


def is_worthwhile(sizes: Sequence[int], large_bytes: int) -> bool:
    """True when a partition whose shards, superseded ones aside, are of these sizes in bytes is better compacted.

    It has several, and they are smaller than `large_bytes` on average: rows that lie in large shards already are not
    copied again.

    Example: 30 shards of 1 MB are, with large_bytes of 8 MB; one shard of any size, or 30 of 40 MB, are not.
    """
    return len(sizes) > 1 and sum(sizes) < large_bytes * len(sizes)


def compact(files: Files, folder: str, name: ShardName, large_bytes: int) -> Note | None:
    """Put the rows of every shard of a partition whose name is smaller than `name` into one, bit for bit, in order.

    Every shard of a smaller name must be stored by now, and none may be removed meanwhile. Memory is bounded by
    PIECE_BYTES and the largest batch of rows.

    Returns:
        The compacted shard, for the inventory; None when the partition is left as it is, since it is not worthwhile.

    Raises:
        ShardError: a shard cannot be read, or the rows are not all there, or one is there twice; nothing changes.
        StoreError: the compacted shard could not be stored.
    """
    sizes = files.sizes(f"{folder}/*.arrow")
    keys = [key for key in current(sizes) if (written := ShardName.of(key)) and written < name]
    if not is_worthwhile([sizes[key] for key in keys], large_bytes):
        return None
    rows = size = 0

    def write(path: Path) -> str:
        nonlocal rows, size
        written, rows = _write(path, files, keys, name)
        size = path.stat().st_size
        return written

    return Note(files.publish(folder, write), "written", rows, size)


def _write(path: Path, files: Files, keys: list[str], name: ShardName) -> tuple[str, int]:
    """Write the rows of shards to a file, and check that they are in it; returns its name, and how many they are."""
    dataset = keys[0].partition("/")[0]
    n_rows = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal n_rows
        for batch in _batches(files, keys):
            n_rows += batch.num_rows
            yield batch

    written = write_shard(path, name, dataset, pieces(counted(), PIECE_BYTES))
    _check(path, dataset, n_rows, keys)
    return written, n_rows


def pieces(batches: Iterable[pa.RecordBatch], piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, in pieces of `piece_bytes` or little more; batches are never split.

    Example: with 10 bytes a piece, batches of 4, 4, 4, 20 and 1 bytes become pieces of 12, 20 and 1.
    """
    gathered: list[pa.RecordBatch] = []
    n_bytes = 0
    for batch in batches:
        if gathered and batch.nbytes >= piece_bytes:
            yield _one(gathered)
            gathered, n_bytes = [], 0
        gathered.append(batch)
        n_bytes += batch.nbytes
        if n_bytes >= piece_bytes:
            yield _one(gathered)
            gathered, n_bytes = [], 0
    if gathered:
        yield _one(gathered)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _batches(files: Files, keys: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """The rows of shards, every byte of which is checked: damage is never copied under new hashes."""
    for key in keys:
        dataset = key.partition("/")[0]
        try:
            with files.open(key) as source:
                shard = open_shard(source, key, key)
                stored = shard.schema()
                if not stored.equals(schema_like(dataset, stored)):
                    raise ShardError(f"{key} has another schema than {dataset}")
                yield from shard.batches()
        except (pa.ArrowException, OSError) as error:
            raise ShardError(f"cannot read {key}: {error}") from error


def _check(path: Path, dataset: str, n_rows: int, keys: list[str]) -> None:
    """Read a written shard again, before it is published: all rows are there, and none of them twice."""
    folder = keys[0].rpartition("/")[0]
    with pa.memory_map(str(path)) as source:
        names = pa.ipc.open_file(source).schema.names
        column = _ID if _ID in names and dataset not in _REPEATING else names[0]
        options = pa.ipc.IpcReadOptions(included_fields=[names.index(column)])
        rows = pa.ipc.open_file(source, options=options).read_all()
        if rows.num_rows != n_rows:
            raise ShardError(
                f"{folder}: {n_rows} rows of {len(keys)} shards were written as {rows.num_rows} into one; they "
                "stay as they are"
            )
        if column == _ID and (n_ids := len(pc.unique(rows[_ID]))) != n_rows:
            raise ShardError(
                f"{folder}: {n_rows} rows of {n_ids} trajectories; its shards stay as they are, "
                "`rollmill verify` says which are there twice"
            )
