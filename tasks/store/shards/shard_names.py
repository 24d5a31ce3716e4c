"""Names of shards, from which readers know which shards to read before they open one.

EPOCH-NUMBER-DIGEST.arrow, or EPOCH-NUMBER-compacted-DIGEST.arrow

The writer of epoch 2 calls its third shard 000002-000003-9f86d081884c7d65.arrow; no two writers of a run are of
one epoch, so they never choose the same name. The digest is that of the shard's end, see rollmill.tasks.store.shards.integrity.

A compacted shard holds the rows of every shard of its partition that was there before it, so it takes the place of
all whose (epoch, number) is smaller: which shards of a partition are to be read follows from their names alone,
and changes in the one moment in which the compacted shard appears.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

_NAME = re.compile(r"(\d{6,})-(\d{6,})(-compacted)?-([0-9a-f]{16})\.arrow")


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """The parts of a shard's file name, which sort in the order in which shards were written.

    Attributes:
        epoch: epoch of the writer, which rises whenever the run is opened for writing.
        number: counts the writer's shards, from 0.
        digest: 16 hex digits; empty until the shard is written.
        is_compacted: True for a shard that replaces all earlier shards of its partition.
    """

    epoch: int
    number: int
    digest: str = ""
    is_compacted: bool = False

    def __str__(self) -> str:
        parts = [f"{self.epoch:06d}", f"{self.number:06d}"]
        parts += ["compacted"] if self.is_compacted else []
        parts += [self.digest] if self.digest else []
        return "-".join(parts) + ".arrow"

    @classmethod
    def of(cls, key: str) -> Self | None:
        """Parse the name of a file, given its key; returns None if it is not the name of a shard."""
        match = _NAME.fullmatch(key.rpartition("/")[2])
        if match is None:
            return None
        return cls(int(match[1]), int(match[2]), match[4], bool(match[3]))


def list_superseded_shards(keys: Iterable[str]) -> list[str]:
    """Select the shards whose rows a later compacted shard of the same partition has, among all `keys`; sorted.

    Example: of the keys step=1/000001-000004-a….arrow, step=1/000001-000009-compacted-b….arrow and
    step=1/000002-000000-c….arrow, only the first is superseded.
    """
    names = {key: name for key in keys if (name := ShardName.of(key))}
    newest: dict[str, ShardName] = {}
    for key, name in names.items():
        partition = key.rpartition("/")[0]
        if name.is_compacted:
            newest[partition] = max(name, newest.get(partition, name))
    return sorted(
        key
        for key, name in names.items()
        if (compacted := newest.get(key.rpartition("/")[0])) and name < compacted
    )


def current_shards(keys: Iterable[str]) -> list[str]:
    """Select the shards to read, without superseded ones, so that no row is read twice and none left out; sorted."""
    keys = list(keys)
    gone = set(list_superseded_shards(keys))
    return sorted(key for key in keys if key not in gone)
