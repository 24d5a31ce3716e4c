"""A run of an older schema version, brought up to today's before anybody writes to it."""

import time
from pathlib import Path

from tasks.store.filesystem import Files
from tasks.store.inventory import all_shards
from tasks.store.layout import RunFolder
from tasks.store.names import ShardName, current, superseded
from tasks.store.reader import read_shard
from tasks.store.shard import write_shard


def migrate(folder: RunFolder, files: Files, grace_s: float) -> int:
    """Write each shard of an older version anew, in today's, and remove the old ones; returns how many there were.

    A shard written anew has the epoch and number of the old one, and a digest, which takes its place; so a kill
    leaves a run that reads as before, and the next call does the rest. The old ones are removed `grace_s` seconds
    after the last of them was written anew, for readers that have listed them; until then a plain scan sees both.

    Raises:
        ShardError: an old shard cannot be read; names it.
        StoreError: one could not be written or removed.
    """
    keys = list(all_shards(files))
    old = [key for key in current(keys) if _is_old(key)]
    for key in old:
        _write_anew(files, folder, key)
    replaced = sorted({*old, *(key for key in superseded(keys) if _is_old(key))})
    if replaced:
        time.sleep(grace_s)
        files.remove(replaced)
    return len(old)


def _is_old(key: str) -> bool:
    """True for a shard of schema version 1, whose name has no digest."""
    name = ShardName.of(key)
    return name is not None and not name.digest


def _write_anew(files: Files, folder: RunFolder, key: str) -> None:
    partition, name = key.rpartition("/")[0], ShardName.of(key)
    assert name is not None
    batches = read_shard(folder, key).to_batches()

    def write(path: Path) -> str:
        return write_shard(path, name, partition.partition("/")[0], batches)

    files.publish(partition, write)
