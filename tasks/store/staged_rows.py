"""Rows made by another process than the run's writer: staged in a file below .tmp, which the writer ingests and removes.

A file that a killed process leaves is removed when the run is opened again, or never used: the rows are made again. So
a row is stored once, whenever a process dies.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollmill.tasks.errors import ShardError, StoreError
from rollmill.tasks.store.filesystem import Files, open_files
from rollmill.tasks.store.folders import PartitionValue, RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import Rows, column_values, no_rows, rows_from_table, rows_without
from rollmill.tasks.store.schemas import dataset_schema
from rollmill.tasks.store.shards.writer import RunWriter

_FOLDER = ".tmp/staged"


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Reference to a file of rows of one partition, one per trajectory, that are still to be stored in the run.

    Attributes:
        dataset: name of the rows' data set.
        partition: value of each partition key of that data set.
        key: path of the file, relative to the run's folder.
        trajectory_ids: one for each row; empty if not known.
    """

    dataset: str
    partition: dict[str, PartitionValue]
    key: str
    trajectory_ids: tuple[str, ...] = ()

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "StagedRows":
        """Make the object from a dictionary that `dataclasses.asdict` made of one."""
        return cls(**values | {"trajectory_ids": tuple(values.get("trajectory_ids", ()))})


def stage_rows(
    folder: RunFolder, dataset: str, rows: Rows, name: str, **partition: PartitionValue
) -> StagedRows:
    """Write rows to a file, of a unique `name`, for the process that has the run's writer; raises StoreError."""

    def write(path: Path) -> str:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, dataset_schema(dataset)) as writer:
            writer.write_batch(rows)
        return f"{name}.arrow"

    key = open_files(folder).publish(_FOLDER, write)
    return StagedRows(dataset, dict(partition), key, tuple(rows.column("trajectory_id").to_pylist()))


async def ingest_rows(folder: RunFolder, files: Files, writer: RunWriter, staged: StagedRows) -> int:
    """Store staged rows, except those that are stored already, and remove the file; returns how many were stored.

    Raises:
        StoreError: the file cannot be read although not all rows are stored, or they could not be stored.
    """
    rows = await asyncio.to_thread(_read_unstored, folder, staged)
    if rows.num_rows:
        await writer.append(staged.dataset, rows, **staged.partition)
    await asyncio.to_thread(files.remove, [staged.key])
    return int(rows.num_rows)


def _read_unstored(folder: RunFolder, staged: StagedRows) -> Rows:
    # A kill between storing the rows and removing the file leaves both; the rows must not be stored twice.
    table = read(folder, staged.dataset, ["trajectory_id"], **staged.partition)
    stored = set(column_values(rows_from_table(table), "trajectory_id"))
    if staged.trajectory_ids and stored.issuperset(staged.trajectory_ids):
        return no_rows(staged.dataset)
    try:
        with open_files(folder).open(staged.key) as file:
            rows = rows_from_table(pa.ipc.open_file(file).read_all())
    except (ShardError, pa.ArrowException) as error:
        where = folder.path(staged.key)
        raise StoreError(
            f"rows of {staged.dataset} were staged in {where}, which cannot be read: {error}"
        ) from error
    return rows_without(rows, "trajectory_id", stored)


def remove_staged_rows(files: Files) -> None:
    """Remove all files of staged rows, which an earlier process wrote and none has stored."""
    files.remove(files.keys(f"{_FOLDER}/*"))
