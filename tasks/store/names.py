"""Names of shards, which say what must be known of a shard before it is opened.

EPOCH-NUMBER-DIGEST.arrow, or EPOCH-NUMBER-compacted-DIGEST.arrow

The writer of epoch 2 calls its third shard 000002-000003-9f86d081884c7d65.arrow; no two writers of a run are of
one epoch, so they never choose the same name. The digest is that of the shard's end, see tasks.store.shard. A
shard of schema version 1 has none.

A compacted shard holds the rows of every shard of its partition that was there before it, so it takes the place of
all whose (epoch, number) is smaller: which shards of a partition are to be read follows from their names alone,
and changes in the one moment in which the compacted shard appears.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

_NAME = re.compile(r"(\d{6,})-(\d{6,})(-compacted)?(?:-([0-9a-f]{16}))?\.arrow")


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """A shard's name, ordered as shards were written.

    Attributes:
        epoch: of its writer.
        number: counts the writer's shards, from 0.
        digest: 16 hex digits; empty in shards of schema version 1.
        is_compacted: True for a shard that takes the place of those before it.
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
        """What the name of a file says, given its key; None when it is no shard's."""
        match = _NAME.fullmatch(key.rpartition("/")[2])
        if match is None:
            return None
        return cls(int(match[1]), int(match[2]), match[4] or "", bool(match[3]))


def superseded(keys: Iterable[str]) -> list[str]:
    """The shards, of all among `keys`, whose rows lie in another one of the same partition, sorted.

    That is a compacted one, or, of a shard without a digest, the one of the same epoch and number that has one: it was
    written anew in a later schema version.

    Example: of step=1/000001-000004-a….arrow, step=1/000001-000009-compacted-b….arrow and
    step=1/000002-000000-c….arrow the first.
    """
    names = {key: name for key in keys if (name := ShardName.of(key))}
    newest: dict[str, ShardName] = {}
    anew = {(key.rpartition("/")[0], name.epoch, name.number) for key, name in names.items() if name.digest}
    for key, name in names.items():
        partition = key.rpartition("/")[0]
        if name.is_compacted:
            newest[partition] = max(name, newest.get(partition, name))
    return sorted(
        key
        for key, name in names.items()
        if ((compacted := newest.get(key.rpartition("/")[0])) and name < compacted)
        or (not name.digest and (key.rpartition("/")[0], name.epoch, name.number) in anew)
    )


def current(keys: Iterable[str]) -> list[str]:
    """The shards to read among all that lie in one or more partitions: no row twice, none left out; sorted."""
    keys = list(keys)
    gone = set(superseded(keys))
    return sorted(key for key in keys if key not in gone)
