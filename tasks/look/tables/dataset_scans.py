"""The rows of a run's data sets as lazy Polars frames, from a disk or from S3."""

from collections.abc import Iterator, Mapping
from functools import partial

import polars as pl
from polars.io.plugins import register_io_source

from rollmill.tasks.errors import SchemaError
from rollmill.tasks.store.folders import PartitionValue, RunFolder
from rollmill.tasks.store.reader import list_policies, list_shards, list_state_environments, scan
from rollmill.tasks.store.schema_versions import ADDED_COLUMNS
from rollmill.tasks.store.schemas import dataset_schema
from rollmill.tasks.store.shards.shard_names import ShardName


def scan_dataset(folder: RunFolder, dataset: str, partition: Mapping[str, PartitionValue]) -> pl.LazyFrame:
    """Return a data set's rows with the run's `location`, those of `logprobs` with their `policy` too.

    Polars reads them on a disk, Rollmill's own reader on S3.

    Raises:
        SchemaError: unknown data set or partition, or `states` without an environment that has rows.
    """
    if dataset == "states" and partition.get("env") not in (there_are := list_state_environments(folder)):
        names = ", ".join(there_are) or "none"
        raise SchemaError(
            f"states: give env=NAME, an environment that {folder.location} has states of; there are {names}"
        )
    if dataset != "logprobs":
        return _scan_partition(folder, dataset, partition)
    policies = [partition["policy"]] if "policy" in partition else list_policies(folder)
    parts = [
        _scan_partition(folder, dataset, {**partition, "policy": each}).with_columns(
            pl.lit(str(each)).alias("policy")
        )
        for each in policies
    ]
    none = _scan_partition(folder, dataset, partition).with_columns(pl.lit("").alias("policy"))
    return pl.concat(parts) if parts else none


def _scan_partition(folder: RunFolder, dataset: str, partition: Mapping[str, PartitionValue]) -> pl.LazyFrame:
    shards = list_shards(folder, dataset, **partition)
    if folder.is_local and shards:
        rows = _scan_shards(dataset, shards)
    else:
        rows = register_io_source(
            partial(_read_columns, folder, dataset, partition), schema=_polars_schema(dataset)
        )
    return rows.with_columns(pl.lit(folder.location).alias("location"))


def _scan_shards(dataset: str, shards: list[str]) -> pl.LazyFrame:
    """Scan local shards; where the schema version of their rows had fewer columns, those that it lacked are filled."""
    # A run's name may have signs of a pattern, such as lr[1].
    scan_files = partial(pl.scan_ipc, glob=False)
    added = ADDED_COLUMNS.get(dataset, {})
    if not added:
        return scan_files(shards)
    # All shards of an epoch are of one writer, and so of one version: reading the schema of each would take as long as its rows.
    by_epoch: dict[int, list[str]] = {}
    for each in shards:
        name = ShardName.of(each)
        by_epoch.setdefault(name.epoch if name else 0, []).append(each)
    by_missing: dict[tuple[str, ...], list[str]] = {}
    for alike in by_epoch.values():
        stored = pl.read_ipc_schema(alike[0])
        by_missing.setdefault(tuple(name for name in added if name not in stored), []).extend(alike)
    schema = _polars_schema(dataset)
    parts = [
        scan_files(alike)
        .with_columns(
            pl.lit(pl.Series([added[name]], dtype=schema[name])).first().alias(name) for name in missing
        )
        .select(schema.names())
        for missing, alike in by_missing.items()
    ]
    return pl.concat(parts)


def _read_columns(
    folder: RunFolder,
    dataset: str,
    partition: Mapping[str, PartitionValue],
    names: list[str] | None,
    predicate: pl.Expr | None,
    n_rows: int | None,
    _: int | None,
) -> Iterator[pl.DataFrame]:
    """Read the columns that a query needs, for Polars."""
    names = [*_polars_schema(dataset)] if names is None else names
    needed = list(dict.fromkeys([*names, *(predicate.meta.root_names() if predicate is not None else ())]))
    yield finish_scan(scan(folder, dataset, needed, **partition), names, predicate, n_rows)


def finish_scan(
    rows: pl.LazyFrame, names: list[str], predicate: pl.Expr | None, n_rows: int | None
) -> pl.DataFrame:
    """Return those of the first `n_rows` rows that meet `predicate`; Polars gives both where a limit comes before a condition."""
    found = rows if n_rows is None else rows.head(n_rows)
    return (found if predicate is None else found.filter(predicate)).select(names).collect()


def _polars_schema(dataset: str) -> pl.Schema:
    # Converting an empty Arrow table instead would import pandas, where it is installed: 0.4 s.
    return pl.Schema(dataset_schema(dataset))
