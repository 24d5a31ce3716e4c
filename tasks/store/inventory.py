"""The inventory: which shards were written and removed, so that one that is missing is seen.

A writer notes what it did in rows of `shards`, at the end of each step and at its own end, as one small shard. What a
writer that was killed did not get to note, the next one finds and notes. An inventory's shard is noted by the next,
so that only the newest of all is noted nowhere.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tasks.errors import ShardError
from tasks.store.filesystem import Files, files_of
from tasks.store.layout import PARTITION_KEYS, RunFolder, partition_pattern
from tasks.store.names import ShardName, current
from tasks.store.reader import read_shard
from tasks.store.schemas import batch_of

DATASET = "shards"


@dataclass(frozen=True, slots=True)
class Note:
    """What happened to a shard.

    Attributes:
        shard: its key.
        rows: that it has; 0 when it was removed.
        bytes: its size; 0 when it was removed.
    """

    shard: str
    event: Literal["written", "removed"]
    rows: int = 0
    bytes: int = 0


def all_shards(files: Files) -> dict[str, int]:
    """Size of every shard of a run by its key."""
    found: dict[str, int] = {}
    for dataset in PARTITION_KEYS:
        found |= files.sizes(f"{partition_pattern(dataset, {})}/*.arrow")
    return found


def all_files(files: Files) -> dict[str, int]:
    """Size of everything that lies in the data sets of a run, in a partition or not, by its key."""
    found = all_shards(files)
    for dataset in PARTITION_KEYS:
        found |= files.sizes(f"{dataset}/**/*")
    return found


def read_notes(folder: RunFolder, *, skip_damaged: bool = False) -> dict[str, Note]:
    """The last note of each shard, by its key.

    Raises:
        ShardError: a shard of the inventory cannot be read, unless those are skipped.
    """
    notes: dict[str, Note] = {}
    for key in current(files_of(folder).keys(f"{partition_pattern(DATASET, {})}/*.arrow")):
        try:
            rows = read_shard(folder, key, ["shard", "event", "rows", "bytes"])
        except ShardError:
            if not skip_damaged:
                raise
            continue
        notes |= {row["shard"]: Note(**row) for row in rows.to_pylist()}
    return notes


def unnoted(folder: RunFolder) -> list[Note]:
    """Shards that are there and not noted, as notes; one that cannot be read is left to `verify`."""
    notes, found = read_notes(folder, skip_damaged=True), []
    for key, size in all_shards(files_of(folder)).items():
        if is_noted(notes, key):
            continue
        try:
            found.append(Note(key, "written", read_shard(folder, key, ["run"]).num_rows, size))
        except ShardError:
            continue
    return found


def is_noted(notes: Mapping[str, Note], key: str) -> bool:
    """True when a shard is noted as being there."""
    return key in notes and notes[key].event == "written"


class Inventory:
    """What a writer did and has not noted yet; used from several threads."""

    def __init__(self, folder: RunFolder, run: str, epoch: int) -> None:
        self._folder, self._run, self._epoch = folder, run, epoch
        self._notes: list[Note] = []
        self._lock = threading.Lock()

    def find(self) -> None:
        """Take up what earlier writers did not get to note; it reads the inventory, and lists every shard."""
        self.add(unnoted(self._folder))

    def add(self, notes: Iterable[Note]) -> None:
        """Take up what was done."""
        with self._lock:
            self._notes.extend(notes)

    def take(self) -> list[Note]:
        """What is to be noted; nothing when that is alone what noting itself has written."""
        with self._lock:
            if all(_is_of_noting(note) for note in self._notes):
                return []
            notes, self._notes = self._notes, []
        return notes

    def rows(self, notes: Sequence[Note]) -> pa.RecordBatch:
        """Notes as rows of `shards`."""
        columns: dict[str, object] = {"run": [self._run] * len(notes), "epoch": [self._epoch] * len(notes)}
        for name in ("shard", "event", "rows", "bytes"):
            columns[name] = [getattr(note, name) for note in notes]
        return batch_of(DATASET, columns)


def _is_of_noting(note: Note) -> bool:
    """True for a small shard of the inventory, which the next notes will name; False for one made of several."""
    name = ShardName.of(note.shard)
    return note.shard.startswith(f"{DATASET}/") and name is not None and not name.is_compacted
