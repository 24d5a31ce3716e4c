"""The inventory: which shards were written and removed, so that a missing one is noticed.

A writer records its shards in rows of the data set `shards`, as one small shard at the end of each step and at its own
end. The next writer finds and records what a killed one did not. An inventory shard is recorded by the next one, so that
only the newest is recorded nowhere.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.filesystem import Files, open_files
from rollmill.tasks.store.folders import PARTITION_KEYS, RunFolder, partition_pattern
from rollmill.tasks.store.reader import read_shard
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.shard_names import ShardName, current_shards

INVENTORY = "shards"


@dataclass(frozen=True, slots=True)
class ShardEvent:
    """One row of a run's inventory: the shard with a key was written with so many rows and bytes, or removed (then both are 0)."""

    shard: str
    event: Literal["written", "removed"]
    rows: int = 0
    bytes: int = 0


def list_shard_sizes(files: Files) -> dict[str, int]:
    """List every shard of a run: size in bytes by key."""
    found: dict[str, int] = {}
    for dataset in PARTITION_KEYS:
        found |= files.sizes(f"{partition_pattern(dataset, {})}/*.arrow")
    return found


def list_file_sizes(files: Files) -> dict[str, int]:
    """List every file in the folders of a run's data sets, in a partition or not: size in bytes by key."""
    found = list_shard_sizes(files)
    for dataset in PARTITION_KEYS:
        found |= files.sizes(f"{dataset}/**/*")
    return found


def read_inventory(folder: RunFolder, *, skip_damaged: bool = False) -> dict[str, ShardEvent]:
    """Read the last recorded event of each shard from a run's inventory, by key; raises ShardError for a damaged shard of it."""
    notes: dict[str, ShardEvent] = {}
    for key in current_shards(open_files(folder).keys(f"{partition_pattern(INVENTORY, {})}/*.arrow")):
        try:
            rows = read_shard(folder, key, ["shard", "event", "rows", "bytes"])
        except ShardError:
            if not skip_damaged:
                raise
            continue
        notes |= {row["shard"]: ShardEvent(**row) for row in rows.to_pylist()}
    return notes


def list_unrecorded_shards(folder: RunFolder) -> list[ShardEvent]:
    """List the shards that exist and that the inventory does not have, as events; without unreadable shards."""
    notes, found = read_inventory(folder, skip_damaged=True), []
    for key, size in list_shard_sizes(open_files(folder)).items():
        if is_recorded(notes, key):
            continue
        try:
            found.append(ShardEvent(key, "written", read_shard(folder, key, ["run"]).num_rows, size))
        except ShardError:
            # `verify` reports it; a writer must be able to open a run with a damaged shard.
            continue
    return found


def is_recorded(notes: Mapping[str, ShardEvent], key: str) -> bool:
    """Return True if `notes` has a shard and says that it was written."""
    return key in notes and notes[key].event == "written"


class Inventory:
    """Events of one writer's shards (written, removed) that are not recorded in the run yet; used from several threads."""

    def __init__(self, folder: RunFolder, run: str, epoch: int) -> None:
        self._folder, self._run, self._epoch = folder, run, epoch
        self._notes: list[ShardEvent] = []
        self._lock = threading.Lock()

    def find(self) -> Sequence[ShardEvent]:
        """Return the shards that other writers did not record; reads the inventory and lists every shard."""
        return list_unrecorded_shards(self._folder)

    def add(self, notes: Iterable[ShardEvent]) -> None:
        """Add events to be recorded."""
        with self._lock:
            self._notes.extend(notes)

    def take(self) -> list[ShardEvent]:
        """Remove and return the events to record; if all are about small inventory shards, they stay and none is returned."""
        with self._lock:
            # The record is an inventory shard too: if it were recorded at once, each record would cause another.
            if all(_is_inventory_shard(note) for note in self._notes):
                return []
            notes, self._notes = self._notes, []
        return notes

    def rows(self, notes: Sequence[ShardEvent]) -> pa.RecordBatch:
        """Convert events to rows of the data set `shards`."""
        columns: dict[str, object] = {"run": [self._run] * len(notes), "epoch": [self._epoch] * len(notes)}
        for name in ("shard", "event", "rows", "bytes"):
            columns[name] = [getattr(note, name) for note in notes]
        return make_batch(INVENTORY, columns)


def _is_inventory_shard(note: ShardEvent) -> bool:
    """Return True for the event of a small shard of the inventory, False for a compacted one or another shard."""
    name = ShardName.of(note.shard)
    return note.shard.startswith(f"{INVENTORY}/") and name is not None and not name.is_compacted


class ForwardedInventory(Inventory):
    """Events of the shards of a process that writes to another's run: that process records them, see `forward`."""

    def find(self) -> Sequence[ShardEvent]:
        """Return nothing: what killed writers stored is recorded by the process that holds the run's lock."""
        return ()

    def take(self) -> list[ShardEvent]:
        """Return nothing to record here."""
        return []

    def forward(self) -> list[ShardEvent]:
        """Remove and return the events, which the process that holds the run's lock is to record."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes
