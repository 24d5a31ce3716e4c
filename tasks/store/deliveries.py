"""Rows that another process than the run's writer has made: a file below .tmp, which the writer's process stores and removes.

What a process leaves there that is killed is gone when the run is opened again, or stays unused: whoever made the rows
makes them again. So a row is stored once, whenever a process dies.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.errors import ShardError, StoreError
from tasks.store.filesystem import Files, files_of
from tasks.store.layout import PartitionValue, RunFolder
from tasks.store.reader import read
from tasks.store.rows import Rows, no_rows, rows_of, values, without
from tasks.store.schemas import schema_of
from tasks.store.writer import RunWriter

_FOLDER = ".tmp/deliveries"


@dataclass(frozen=True, slots=True)
class Delivery:
    """Rows of one partition, with a trajectory each, that wait to be stored.

    Attributes:
        dataset: the data set they are of.
        partition: value of each of its partition keys.
        key: where they lie, below the run's folder.
        trajectory_ids: whose they are; empty when that is not known.
    """

    dataset: str
    partition: dict[str, PartitionValue]
    key: str
    trajectory_ids: tuple[str, ...] = ()

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "Delivery":
        """The inverse of dataclasses.asdict."""
        return cls(**values | {"trajectory_ids": tuple(values.get("trajectory_ids", ()))})


def hand_over(
    folder: RunFolder, dataset: str, rows: Rows, name: str, **partition: PartitionValue
) -> Delivery:
    """Leave rows for the writer's process; `name` is unique among what waits to be stored.

    Raises:
        StoreError: they could not be written.
    """

    def write(path: Path) -> str:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema_of(dataset)) as writer:
            writer.write_batch(rows)
        return f"{name}.arrow"

    if folder.is_local:
        folder.tmp.mkdir(parents=True, exist_ok=True)
    key = files_of(folder).publish(_FOLDER, write)
    return Delivery(dataset, dict(partition), key, tuple(rows.column("trajectory_id").to_pylist()))


async def take_in(folder: RunFolder, files: Files, writer: RunWriter, delivery: Delivery) -> int:
    """Store what was handed over, but for rows that are stored already, and remove the file; returns how many rows.

    Raises:
        StoreError: rows that are not stored are not in the file either, or could not be stored.
    """
    rows = await asyncio.to_thread(_new_rows, folder, delivery)
    if rows.num_rows:
        await writer.append(delivery.dataset, rows, **delivery.partition)
    await asyncio.to_thread(files.remove, [delivery.key])
    return int(rows.num_rows)


def _new_rows(folder: RunFolder, delivery: Delivery) -> Rows:
    table = read(folder, delivery.dataset, ["trajectory_id"], **delivery.partition)
    stored = set(values(rows_of(table), "trajectory_id"))
    if delivery.trajectory_ids and stored.issuperset(delivery.trajectory_ids):
        return no_rows(delivery.dataset)
    try:
        with files_of(folder).open(delivery.key) as file:
            rows = rows_of(pa.ipc.open_file(file).read_all())
    except (ShardError, pa.ArrowException) as error:
        where = folder.path(delivery.key)
        raise StoreError(
            f"rows of {delivery.dataset} were handed over as {where}, and cannot be read: {error}"
        ) from error
    return without(rows, "trajectory_id", stored)


def clear(files: Files) -> None:
    """Remove what an earlier process left to be stored."""
    files.remove(files.keys(f"{_FOLDER}/*"))
