"""One commit: the rows gathered for several partitions, stored as one shard each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from tasks.errors import StoreError
from tasks.store.filesystem import Files
from tasks.store.inventory import Note
from tasks.store.names import ShardName
from tasks.store.shard import write_shard

AFTER = {"rollouts": ("routing", "states"), "scores": ("rollouts",)}
"""Which data sets' rows of a step must be there before one's own."""

_ORDER = {"routing": 0, "states": 0, "rollouts": 1, "scores": 2}


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of a commit.

    Attributes:
        failed: the error of each folder whose rows could not be stored.
        written: the shards of the others.
    """

    failed: Mapping[str, StoreError]
    written: Sequence[Note]


def commit(
    files: Files, epoch: int, first_number: int, gathered: Mapping[str, Sequence[pa.RecordBatch]]
) -> Committed:
    """Store one shard for each folder, numbered from `first_number`.

    A folder that fails does not touch the others, but that a step's rollouts come after what lies beside them and
    its scores after its rollouts, and fail with them (AFTER): there is no score without its rollout, and no rollout
    without its routed experts, whenever the process dies.

    Example: {"plans/step=000000": [...], "rollouts/step=000000": [...]} with epoch 2 and first number 7 becomes
    plans/step=000000/000002-000007-DIGEST.arrow and rollouts/step=000000/000002-000008-DIGEST.arrow.
    """
    failed: dict[str, StoreError] = {}
    written: list[Note] = []
    in_order = sorted(gathered.items(), key=lambda each: _ORDER.get(dataset_of(each[0]), 1))
    for number, (folder, appended) in enumerate(in_order, first_number):
        dataset, step = dataset_of(folder), folder.rpartition("/")[2]
        before = (each for each in failed if dataset_of(each) in AFTER.get(dataset, ()))
        if lost := [failed[each] for each in before if each.endswith(f"/{step}")]:
            failed[folder] = lost[0]
            continue
        try:
            write = partial(write_shard, name=ShardName(epoch, number), dataset=dataset, appended=appended)
            written.append(publish_noted(files, folder, write, sum(rows.num_rows for rows in appended)))
        except StoreError as error:
            failed[folder] = error
        except Exception as error:  # noqa: BLE001 - it must reach who waits for these rows, and nobody else
            failed[folder] = StoreError(f"cannot write to {folder}: {type(error).__name__}: {error}")
    return Committed(failed, written)


def publish_noted(files: Files, folder: str, write: Callable[[Path], str], rows: int) -> Note:
    """Publish a shard of so many rows; returns the note of it."""
    size = 0

    def measured(path: Path) -> str:
        nonlocal size
        name = write(path)
        size = path.stat().st_size
        return name

    return Note(files.publish(folder, measured), "written", rows, size)


def dataset_of(folder: str) -> str:
    """The data set that a partition's folder is of."""
    return folder.partition("/")[0]
