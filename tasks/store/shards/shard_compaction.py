"""Compaction: the small shards of a partition become one shard, which replaces them the moment it appears.

Its name says which shards it replaces, see rollmill.tasks.store.shards.shard_names: every shard of the partition with a
smaller (epoch, number), and it holds exactly their rows. So a kill leaves the small shards with or without the compacted
one, and readers that use the names always see every row once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rollmill.tasks.errors import SchemaError, ShardError
from rollmill.tasks.store.filesystem import Files
from rollmill.tasks.store.rows import rows_from_table
from rollmill.tasks.store.schema_versions import check_version, fill_added_columns, stored_schema
from rollmill.tasks.store.schemas import dataset_schema
from rollmill.tasks.store.shards.integrity import open_shard
from rollmill.tasks.store.shards.inventory import ShardEvent
from rollmill.tasks.store.shards.shard import publish_shard, write_shard
from rollmill.tasks.store.shards.shard_names import ShardName, current_shards

_ID_COLUMN = "trajectory_id"
# Data sets that may hold a trajectory twice; the last two after a kill, see rollmill.tasks.store.expert_routing.
_REPEATING = {"batches", "routing", "states"}


def group_by_partition(keys: Iterable[str]) -> dict[str, list[str]]:
    """Group the keys of the shards to read by the folder of their partition, in order; superseded shards are left out.

    Example: {"plans/step=000001": ["plans/step=000001/000001-000000-9f86d081884c7d65.arrow"]}
    """
    found: dict[str, list[str]] = defaultdict(list)
    for key in current_shards(keys):
        found[key.rpartition("/")[0]].append(key)
    return dict(found)


def is_worthwhile(sizes: Sequence[int], large_bytes: int) -> bool:
    """Return True if a partition with shards of these sizes in bytes should be compacted.

    It must have several shards, smaller than `large_bytes` on average: rows in large shards are not copied again.

    Example: 30 shards of 1 MB are, with large_bytes of 8 MB; one shard of any size, or 30 of 40 MB, are not.
    """
    return len(sizes) > 1 and sum(sizes) < large_bytes * len(sizes)


def compact_partition(files: Files, folder: str, name: ShardName, large_bytes: int) -> ShardEvent | None:
    """Copy the rows of a partition's shards whose names sort before `name` into one new shard, bit for bit, in order.

    Every shard whose name sorts before `name` must be stored, and none may be removed meanwhile. Memory is bounded by the
    largest batch of rows.

    Returns:
        Event of the compacted shard; None if compacting is not worthwhile and nothing was done.

    Raises:
        ShardError: a shard cannot be read, or rows are missing or twice; nothing changes.
        StoreError: the compacted shard could not be stored.
    """
    sizes = files.sizes(f"{folder}/*.arrow")
    keys = [key for key in current_shards(sizes) if (written := ShardName.of(key)) and written < name]
    if not is_worthwhile([sizes[key] for key in keys], large_bytes):
        return None

    def write(path: Path) -> tuple[str, int]:
        dataset, n_rows = keys[0].partition("/")[0], 0

        def count_rows() -> Iterator[pa.RecordBatch]:
            nonlocal n_rows
            for batch in _read_batches(files, keys):
                n_rows += batch.num_rows
                yield batch

        written = write_shard(path, name, dataset, count_rows())
        _check_written(path, dataset, n_rows, keys)
        return written, n_rows

    return publish_shard(files, folder, write)


def _read_batches(files: Files, keys: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of shards; every byte is checked, so that damage is never copied under new hashes.

    Rows of an older schema version get the columns that they lack.
    """
    for key in keys:
        dataset = key.partition("/")[0]
        try:
            with files.open(key) as source:
                shard = open_shard(source, key, key)
                stored = shard.schema()
                check_version(stored)
                if not stored.equals(stored_schema(dataset, stored)):
                    raise ShardError(f"{key} has another schema than {dataset}")
                for batch in shard.batches():
                    yield _upgrade(dataset, batch)
        except (SchemaError, pa.ArrowException, OSError) as error:
            raise ShardError(f"cannot read {key}: {error}") from error


def _upgrade(dataset: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    if dataset == "states" or batch.schema.equals(dataset_schema(dataset)):
        return batch
    rows = fill_added_columns(dataset, pa.Table.from_batches([batch]), dataset_schema(dataset).names)
    return rows_from_table(rows)


def _check_written(path: Path, dataset: str, n_rows: int, keys: list[str]) -> None:
    """Read a written shard before it is published, and check that it has every row exactly once."""
    folder = keys[0].rpartition("/")[0]
    with pa.memory_map(str(path)) as source:
        names = pa.ipc.open_file(source).schema.names
        column = _ID_COLUMN if _ID_COLUMN in names and dataset not in _REPEATING else names[0]
        options = pa.ipc.IpcReadOptions(included_fields=[names.index(column)])
        rows = pa.ipc.open_file(source, options=options).read_all()
        if rows.num_rows != n_rows:
            raise ShardError(
                f"{folder}: {n_rows} rows of {len(keys)} shards were written as {rows.num_rows} into one; they "
                "stay as they are"
            )
        if column == _ID_COLUMN and (n_ids := len(pc.unique(rows[_ID_COLUMN]))) != n_rows:
            raise ShardError(
                f"{folder}: {n_rows} rows of {n_ids} trajectories; its shards stay as they are, "
                "`rollmill verify` says which are there twice"
            )
