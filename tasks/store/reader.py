"""Read data sets: rows as Arrow tables, or as a Polars query; and which partitions have shards."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol
from urllib.parse import unquote

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollmill.tasks.errors import SchemaError, ShardError, ShardGoneError
from rollmill.tasks.store.filesystem import Files, open_files
from rollmill.tasks.store.folders import PartitionValue, RunFolder, partition_pattern, step_from_key
from rollmill.tasks.store.rows import name_first
from rollmill.tasks.store.schema_versions import check_version, fill_added_columns, stored_schema
from rollmill.tasks.store.schemas import (
    dataset_schema,
    schema_like,
    states_schema,
)
from rollmill.tasks.store.shards.integrity import open_shard
from rollmill.tasks.store.shards.shard_names import ShardName, current_shards

# A portion of a data set is made of pieces of about this size (4 MiB), as large as the record batches of shards.
PIECE_BYTES = 1 << 22


class Scan(Protocol):
    """Type of the function `scan` and of replacements such as `RowCache.scan`, which keeps rows it has read."""

    def __call__(
        self,
        folder: RunFolder,
        dataset: str,
        columns: Sequence[str] | None = None,
        **partition: PartitionValue,
    ) -> pl.LazyFrame:
        """Return a query over some columns of a data set (None: all), or of the given partitions."""


def read(
    folder: RunFolder, dataset: str, columns: Sequence[str] | None = None, **partition: PartitionValue
) -> pa.Table:
    """Read a data set, or some of its partitions, as an Arrow table; zero rows if nothing is stored.

    Columns come in the requested order; None: all of them.

    Example: read(folder, "scores", ["trajectory_id", "reward"], scorer="addition@1", step=12)

    Raises:
        SchemaError: unknown data set, column or partition.
        ShardError: a shard cannot be read, or has another schema; names the file.
    """
    files = open_files(folder)
    list_shards = partial(_list_keys, files, dataset, partition)
    if dataset == "states":
        # Its columns depend on the environment.
        shards = list_shards()
        whole = read_shard_schema(folder, shards[0]) if shards else states_schema("", {})
    else:
        whole = dataset_schema(dataset)
    schema = _select_fields(dataset, whole, columns)
    tables = read_listed(
        list_shards, lambda key: _read_shard(files, folder, key, whole, schema), files.reads_at_once
    )
    return pa.concat_tables(tables) if tables else schema.empty_table()


def read_trajectories(
    folder: RunFolder, step: int, ids: Sequence[str], columns: Sequence[str] | None = None
) -> pa.Table:
    """Read the rollouts of a step with the given trajectory ids, in order of `ids`.

    Raises:
        ShardError: a shard cannot be read, or trajectories are missing, which it names.
    """
    wanted = pa.array(ids, pa.string())
    names = list(columns) if columns is not None else dataset_schema("rollouts").names
    stored = read_chosen(folder, "rollouts", ids, list(dict.fromkeys(["trajectory_id", *names])), step=step)
    places = pc.index_in(wanted, value_set=stored["trajectory_id"])
    if places.null_count:
        missing = [
            each for each, is_stored in zip(ids, places.is_valid().to_pylist(), strict=True) if not is_stored
        ]
        raise ShardError(
            f"{folder.dataset('rollouts', step=step)} has {len(ids) - len(missing)} of {len(ids)} trajectories; "
            f"missing are {name_first(missing)}"
        )
    return stored.select(names).take(places)


def read_chosen(
    folder: RunFolder,
    dataset: str,
    ids: Sequence[str],
    columns: Sequence[str],
    portion: tuple[int, int] = (0, 1),
    **partition: PartitionValue,
) -> pa.Table:
    """Read the rows with some trajectory ids, in the order in which they are stored; of other rows at most the ids are read.

    From a local disk these rows alone are read, in blocks of 128 KiB; from S3, shards of at most 8 MiB whole, and of larger
    ones the batches with these rows.

    Args:
        folder: folder of the run.
        dataset: name of a data set with the column trajectory_id.
        ids: the trajectories; those that are not stored have no row.
        columns: names of the columns to read, in the order of the result.
        portion: (i, n) for the i-th of n portions, about equal in bytes; together they have each row once.
        partition: values of partition keys.

    Raises:
        SchemaError: unknown data set, column or partition.
        ShardError: a shard cannot be read, or has another schema; names the file.
    """
    files, whole, wanted = open_files(folder), dataset_schema(dataset), pa.array(ids, pa.string())
    schema = _select_fields(dataset, whole, columns)
    pieces: dict[str, np.ndarray] = {}

    def list_portion() -> list[str]:
        sizes = files.sizes(f"{partition_pattern(dataset, partition)}/*.arrow")
        pieces.update({key: _own_pieces(key, size, *portion) for key, size in sizes.items()})
        return [key for key in current_shards(sizes) if pieces[key].any()]

    tables = read_listed(
        list_portion,
        lambda key: _read_shard(files, folder, key, whole, schema, wanted, pieces[key]),
        files.reads_at_once,
    )
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _own_pieces(key: str, size: int, number: int, n: int) -> np.ndarray:
    """Return which of a shard's pieces of about PIECE_BYTES belong to the `number`-th of `n` portions.

    The pieces go to the portions in turn, from one that the shard's name chooses. They depend on this shard alone, so that processes
    which list while other shards are stored have the same portions.
    """
    name = ShardName.of(key)
    first = int(name.digest or "0", 16) % n if name else 0
    is_own: np.ndarray = (first + np.arange(-(-size // PIECE_BYTES) or 1)) % n == number
    return is_own


def scan(
    folder: RunFolder, dataset: str, columns: Sequence[str] | None = None, **partition: PartitionValue
) -> pl.LazyFrame:
    """Read a data set or some of its partitions, like `read`, and return the rows as a lazy Polars frame."""
    rows = pl.from_arrow(read(folder, dataset, columns, **partition))
    assert isinstance(rows, pl.DataFrame)
    return rows.lazy()


def list_shards(run: RunFolder | str, dataset: str, **partition: PartitionValue) -> list[str]:
    """List the paths of a data set's current shards, for other libraries; they have every row once, also during a compaction.

    The files exist for at least `store.compaction_grace_s` seconds more.

    Example: pl.scan_ipc(list_shards("runs/quickstart", "rollouts"), hive_partitioning=True)

    Raises:
        SchemaError: unknown data set or partition.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    return [folder.path(key) for key in _list_keys(open_files(folder), dataset, partition)]


def read_listed(
    listed: Callable[[], list[str]], read_one: Callable[[str], pa.Table], at_once: int = 1
) -> list[pa.Table]:
    """Read every shard that `listed` lists, at most `at_once` in threads; if one was replaced by a compacted shard, list again.

    Raises:
        ShardGoneError: a shard does not exist, and listing again gives the same keys.
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
            # Nothing was compacted meanwhile: the shard is lost, and listing again would never end.
            if keys == before:
                raise


def _list_keys(files: Files, dataset: str, partition: dict[str, PartitionValue]) -> list[str]:
    return current_shards(files.keys(f"{partition_pattern(dataset, partition)}/*.arrow"))


def read_shard_schema(folder: RunFolder, key: str) -> pa.Schema:
    """Read the schema of a shard of `states`, which depends on the environment; raises ShardError if it is unreadable."""
    where = folder.path(key)
    try:
        schema = open_shard(open_files(folder).open(key), key, where).schema()
        return schema_like("states", schema)
    except (SchemaError, pa.ArrowException, OSError) as error:
        raise ShardError(f"cannot read {where}: {error}") from error


def _select_fields(dataset: str, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if columns is None:
        return schema
    if unknown := [name for name in columns if name not in schema.names]:
        raise SchemaError(f"{dataset} has no column {', '.join(unknown)}; it has {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def read_shard(folder: RunFolder, key: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows of one shard, given its key; columns and errors as for `read`."""
    dataset = key.partition("/")[0]
    whole = read_shard_schema(folder, key) if dataset == "states" else dataset_schema(dataset)
    return _read_shard(open_files(folder), folder, key, whole, _select_fields(dataset, whole, columns))


def _read_shard(
    files: Files,
    folder: RunFolder,
    key: str,
    whole: pa.Schema,
    selected: pa.Schema,
    wanted: pa.StringArray | None = None,
    pieces: np.ndarray | None = None,
) -> pa.Table:
    """Read the columns `selected` of a shard, and check its schema and its hashes.

    With `wanted` trajectory ids only their rows are read, in those of the shard's equal `pieces` that are True.
    """
    where = folder.path(key)
    try:
        source = files.open(key)
        size, shard = source.size(), open_shard(source, key, where)
        stored = shard.schema()
        check_version(stored)
        dataset = key.partition("/")[0]
        if not stored.equals(whole if dataset == "states" else stored_schema(dataset, stored)):
            raise ShardError(f"{where} has another schema than {dataset}")
        fields = [at for each in selected.names if (at := stored.get_field_index(each)) >= 0]
        chosen = None
        if wanted is not None and pieces is not None:
            ids = shard.read([stored.get_field_index("trajectory_id")])["trajectory_id"]
            piece = np.arange(len(ids)) * len(pieces) // max(len(ids), 1)
            is_chosen = pc.is_in(ids, value_set=wanted).to_numpy() & pieces[piece]
            if not is_chosen.any():
                return selected.empty_table()
            chosen = np.split(is_chosen, np.cumsum([len(each) for each in ids.chunks])[:-1])
        rows = fill_added_columns(dataset, shard.read(fields, chosen), selected.names)
        table = pa.Table.from_arrays([rows[each] for each in selected.names], schema=selected)
        table.validate(full=True)
        if not folder.is_local and table.nbytes < size // 2:
            # Few columns of a fetched shard would keep all of its bytes in memory; a mapped shard has none there.
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            table = pa.ipc.open_stream(sink.getvalue()).read_all()
    except (SchemaError, pa.ArrowException, OSError) as error:
        raise ShardError(f"cannot read {where}: {error}") from error
    return table


def list_steps(folder: RunFolder, dataset: str, **partition: PartitionValue) -> list[int]:
    """List the steps that a data set has shards of, ascending; for `evaluations` the policy versions.

    Example: list_steps(folder, "scores", scorer="addition@1")
    """
    keys = open_files(folder).keys(f"{partition_pattern(dataset, partition)}/*.arrow")
    return sorted({step for key in keys if (step := step_from_key(key)) is not None})


def list_state_environments(folder: RunFolder) -> list[str]:
    """List the environments with rows in the data set `states`, each of which has other columns; sorted."""
    keys = open_files(folder).keys("states/env=*/step=*/*.arrow")
    return sorted({unquote(key.split("/")[1].removeprefix("env=")) for key in keys})


def list_policies(folder: RunFolder) -> list[str]:
    """List the policies with rows in the data set `logprobs`: `reference`, `trainer` and the names of teachers; sorted."""
    keys = open_files(folder).keys("logprobs/policy=*/step=*/*.arrow")
    return sorted({key.split("/")[1].removeprefix("policy=") for key in keys})


def list_scorers(folder: RunFolder) -> list[str]:
    """List NAME@VERSION of every scorer with stored scores, sorted with digits as numbers: length@9 is before length@10."""
    keys = open_files(folder).keys("scores/scorer=*/step=*/*.arrow")
    found = {key.split("/")[1].removeprefix("scorer=") for key in keys}
    # Every second part is a number.
    parts = {each: re.split(r"(\d+)", each) for each in found}
    return sorted(found, key=lambda each: [(int(p) if n % 2 else 0, p) for n, p in enumerate(parts[each])])
