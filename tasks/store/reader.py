"""Read data sets: rows as Arrow tables, or as a Polars query."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from tasks.errors import SchemaError, ShardError, ShardGoneError
from tasks.store.filesystem import Files, files_of
from tasks.store.findings import named
from tasks.store.integrity import open_shard
from tasks.store.layout import PartitionValue, RunFolder, partition_pattern
from tasks.store.names import current
from tasks.store.schemas import schema_like, schema_of, states_schema
from tasks.store.upgrade import schema_at, upgrade, version_of


class Scan(Protocol):
    """`scan`, or what takes its place: `Shelf.scan` keeps what it has read."""

    def __call__(
        self,
        folder: RunFolder,
        dataset: str,
        columns: Sequence[str] | None = None,
        **partition: PartitionValue,
    ) -> pl.LazyFrame:
        """A query over some columns of a data set, or of the partitions given."""


def read(
    folder: RunFolder, dataset: str, columns: Sequence[str] | None = None, **partition: PartitionValue
) -> pa.Table:
    """The rows of a data set, or of the partitions given; zero rows when nothing is stored.

    Columns come in the order asked for; None: all of them.

    Example: read(folder, "scores", ["trajectory_id", "reward"], scorer="addition@1", step=12)

    Raises:
        SchemaError: unknown data set, column or partition.
        ShardError: a shard cannot be read, or has another schema; names the file.
    """
    files = files_of(folder)
    list_shards = partial(_shards, files, dataset, partition)
    whole = _states_schema(folder, list_shards()) if dataset == "states" else schema_of(dataset)
    schema = _selected(dataset, whole, columns)
    tables = read_listed(
        list_shards, lambda key: _read_shard(files, folder, key, whole, schema), files.reads_at_once
    )
    return pa.concat_tables(tables) if tables else schema.empty_table()


def read_trajectories(
    folder: RunFolder, step: int, ids: Sequence[str], columns: Sequence[str] | None = None
) -> pa.Table:
    """Rollouts of one step in the order of `ids`.

    Raises:
        ShardError: some are not stored; names them.
    """
    names = list(columns) if columns is not None else schema_of("rollouts").names
    stored = read(folder, "rollouts", columns=list(dict.fromkeys(["trajectory_id", *names])), step=step)
    places = pc.index_in(pa.array(ids, pa.string()), value_set=stored["trajectory_id"])
    if places.null_count:
        missing = [
            each for each, is_stored in zip(ids, places.is_valid().to_pylist(), strict=True) if not is_stored
        ]
        raise ShardError(
            f"{folder.dataset('rollouts', step=step)} has {len(ids) - len(missing)} of {len(ids)} trajectories; "
            f"missing are {named(missing)}"
        )
    return stored.select(names).take(places)


def scan(
    folder: RunFolder, dataset: str, columns: Sequence[str] | None = None, **partition: PartitionValue
) -> pl.LazyFrame:
    """A Polars query over some columns of a data set, or of the partitions given; see `read`."""
    rows = pl.from_arrow(read(folder, dataset, columns, **partition))
    assert isinstance(rows, pl.DataFrame)
    return rows.lazy()


def shards(run: RunFolder | str, dataset: str, **partition: PartitionValue) -> list[str]:
    """Where the shards to read by now lie, for other libraries: every row once, also while a run is compacted.

    They stay for `store.compaction_grace_s` at least.

    Example: pl.scan_ipc(shards("runs/quickstart", "rollouts"), hive_partitioning=True)

    Raises:
        SchemaError: unknown data set or partition.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    return [folder.path(key) for key in _shards(files_of(folder), dataset, partition)]


def read_listed(
    listed: Callable[[], list[str]], read_one: Callable[[str], pa.Table], at_once: int = 1
) -> list[pa.Table]:
    """The table of each shard that is listed; listed again when a compacted one took the place of some meanwhile.

    Args:
        listed: lists the shards' keys.
        read_one: reads one.
        at_once: so many are read at once, in threads.

    Raises:
        ShardGoneError: one is listed, and listed again, and cannot be found.
    """
    tables: dict[str, pa.Table] = {}

    def read_new(key: str) -> None:
        if key not in tables:
            tables[key] = read_one(key)

    def read_all(keys: list[str]) -> list[pa.Table]:
        if min(at_once, len(keys)) <= 1:
            for key in keys:
                read_new(key)
        else:
            with ThreadPoolExecutor(min(at_once, len(keys)), thread_name_prefix="store-reader") as threads:
                list(threads.map(read_new, keys))
        return [tables[key] for key in keys]

    keys: list[str] = []
    while True:
        before, keys = keys, listed()
        try:
            return read_all(keys)
        except ShardGoneError:
            if keys == before:
                raise


def _shards(files: Files, dataset: str, partition: dict[str, PartitionValue]) -> list[str]:
    return current(files.keys(f"{partition_pattern(dataset, partition)}/*.arrow"))


def _states_schema(folder: RunFolder, shards: Sequence[str]) -> pa.Schema:
    """The schema of stored states, which their environment decides."""
    return schema_of_shard(folder, shards[0]) if shards else states_schema("", {})


def schema_of_shard(folder: RunFolder, key: str) -> pa.Schema:
    """The schema of a shard of `states`, which its environment decides; ShardError when it cannot be read."""
    where = folder.path(key)
    try:
        schema = open_shard(files_of(folder).open(key), key, where).schema()
        return schema_like("states", schema)
    except (SchemaError, pa.ArrowException, OSError) as error:
        raise ShardError(f"cannot read {where}: {error}") from error


def _selected(dataset: str, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if columns is None:
        return schema
    if unknown := [name for name in columns if name not in schema.names]:
        raise SchemaError(f"{dataset} has no column {', '.join(unknown)}; it has {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def read_shard(folder: RunFolder, key: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of one shard, given its key; see `read`."""
    dataset = key.partition("/")[0]
    whole = schema_of_shard(folder, key) if dataset == "states" else schema_of(dataset)
    return _read_shard(files_of(folder), folder, key, whole, _selected(dataset, whole, columns))


def _read_shard(files: Files, folder: RunFolder, key: str, whole: pa.Schema, selected: pa.Schema) -> pa.Table:
    """Columns of a shard, checked, whatever schema version it has; one of version 1 has no hashes to check by."""
    where = folder.path(key)
    try:
        source = files.open(key)
        size, shard = source.size(), open_shard(source, key, where)
        stored = shard.schema()
        version = version_of(stored)
        expected = schema_at(whole, version)
        if not stored.equals(expected):
            raise ShardError(f"{where} has another schema than {key.split('/')[0]}")
        fields = [expected.get_field_index(each) for each in selected.names if each in expected.names]
        table = upgrade(shard.read(fields), selected, version)
        table.validate(full=True)
        if not folder.is_local and table.nbytes < size // 2:
            table = _copied(table)  # its columns would keep all that was fetched of the shard in memory
    except SchemaError as error:
        raise ShardError(f"cannot read {where}: {error}") from error
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"cannot read {where}: {error}") from error
    return table


def _copied(table: pa.Table) -> pa.Table:
    """The same rows in memory of their own."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()
