"""What is wrong with a run's files: their bytes, schemas and names, and what the inventory misses."""

import re
from collections.abc import Collection, Mapping

import pyarrow as pa

from tasks.errors import SchemaError, ShardError, ShardGoneError
from tasks.store.filesystem import Files
from tasks.store.findings import Finding
from tasks.store.integrity import open_shard
from tasks.store.inventory import DATASET, Note, is_noted
from tasks.store.layout import PARTITION_KEYS, POLICIES, RunFolder
from tasks.store.names import ShardName, superseded
from tasks.store.schemas import schema_like
from tasks.store.upgrade import schema_at, version_of

_RESTORE = "restore it from a copy of the run; without one, its rows are lost"
_VALUES = {"scorer": "[^/]+", "env": "[^/]+", "policy": "|".join(POLICIES).join("()")}
_FOREIGN = "move it out of the data set, whose plain scans it breaks"


def name_finding(folder: RunFolder, key: str) -> Finding | None:
    """What is wrong with the path of a file that lies in a data set."""
    dataset, *partition, _ = key.split("/")
    keys = PARTITION_KEYS[dataset]
    if ShardName.of(key) is None:
        return Finding(folder.path(key), "it is not named as a shard is", _FOREIGN)
    is_placed = len(partition) == len(keys) and all(
        re.fullmatch(f"{name}={_VALUES.get(name, '[0-9]{6,}')}", part)
        for name, part in zip(keys, partition, strict=True)
    )
    if not is_placed:
        expected = "/".join([dataset, *(f"{name}=..." for name in keys)])
        return Finding(folder.path(key), f"it does not lie in a partition, {expected}", _FOREIGN)
    return None


def shard_finding(folder: RunFolder, files: Files, key: str, note: Note | None) -> Finding | None:
    """What is wrong with a shard: every byte of it, its schema, and its rows beside those that were noted."""
    where, name = folder.path(key), ShardName.of(key)
    try:
        shard = open_shard(files.open(key), key, where)
        shard.check()
        version = version_of(shard.schema())
        whole = schema_like(key.partition("/")[0], shard.schema())
        if not shard.schema().equals(schema_at(whole, version)):
            return Finding(where, "its schema is not that of its data set", _FOREIGN)
        if name and not name.digest and version > 1:
            return Finding(where, "its name has no digest, so that its bytes cannot be checked", _RESTORE)
        n_rows = shard.read([0]).num_rows
    except ShardGoneError:
        return None  # a compacted one took its place since it was listed, or the inventory misses it
    except (ShardError, SchemaError, pa.ArrowException, OSError) as error:
        return Finding(where, str(error).removeprefix(f"{where} is "), _RESTORE)
    if note is not None and note.event == "written" and note.rows != n_rows:
        return Finding(where, f"it has {n_rows} rows, and was written with {note.rows}", _RESTORE)
    return None


def inventory_findings(
    folder: RunFolder,
    keys: Collection[str],
    notes: Mapping[str, Note],
    *,
    is_finished: bool,
    first_step: int = 0,
    expired: Collection[str] = (),
) -> list[Finding]:
    """Shards that are noted and missing, and those that are there and ought to be noted by now.

    Args:
        folder: of the run.
        keys: of all shards that are there.
        notes: the last one of each shard.
        is_finished: True when every writer has ended: then all but the newest shard of the inventory are noted.
        first_step: the first one of the run's own, since a fork brings the earlier ones without their inventory.
        expired: shards that the run's settings let go, with a note or without.
    """
    present = set(keys)
    gone = [key for key, note in notes.items() if note.event == "written" and key not in present]
    replaced = set(superseded([*present, *gone]))
    missing = [key for key in gone if key not in replaced and key not in expired]
    unknown = [
        key
        for key in due_notes(present, notes, is_finished=is_finished, first_step=first_step)
        if key not in replaced
    ]
    return [
        Finding(folder.path(key), f"it is missing: it was written with {notes[key].rows} rows", _RESTORE)
        for key in sorted(missing)
    ] + [
        Finding(
            folder.path(key),
            "the inventory does not know it",
            _unknown_remedy(key),
        )
        for key in sorted(unknown)
    ]


def _unknown_remedy(key: str) -> str:
    name = ShardName.of(key)
    epoch = name.epoch if name else 0
    lost = f"{DATASET}/epoch={epoch:06d}/{epoch:06d}-NUMBER-DIGEST.arrow, of a NUMBER above {name.number if name else 0}"
    return (
        f"keep it: the shard of the inventory that noted it is missing, {lost}; restore that from a copy, or let the next "
        "command that writes to the run note this one anew. Only if it was put there by hand, move it out of the run"
    )


def due_notes(
    keys: Collection[str], notes: Mapping[str, Note], *, is_finished: bool, first_step: int = 0
) -> list[str]:
    """The shards that are not noted and should be.

    In a run that goes on those are due that are older than what its newest writer noted, and those that are not newer
    than a batch after which their writer stored another one: a writer notes at each step's end, and first of all
    whatever it finds.
    """
    names = {key: name for key in keys if (name := ShardName.of(key))}
    newest = max(
        (key for key in names if key.startswith(f"{DATASET}/")), key=lambda key: names[key], default=""
    )
    unnoted = [key for key in names if not is_noted(notes, key) and key != newest]
    if is_finished:
        return unnoted
    last = max((name for key in notes if (name := ShardName.of(key))), default=None)
    ends = _noted_ends(names, first_step)
    return [
        key
        for key in unnoted
        if not names[key].is_compacted
        and key not in notes
        and (
            (last is not None and (names[key].epoch, names[key].number) < (last.epoch, last.number))
            or names[key].number <= ends.get(names[key].epoch, -1)
        )
    ]


def _noted_ends(names: Mapping[str, ShardName], first_step: int) -> dict[int, int]:
    """By epoch: the number of the last batch but one that its writer stored; all up to it was noted before the last."""
    batches: dict[int, list[int]] = {}
    for key, name in names.items():
        if (step := re.match(r"batches/step=(\d+)/", key)) and int(step[1]) >= first_step:
            batches.setdefault(name.epoch, []).append(name.number)
    return {epoch: sorted(numbers)[-2] for epoch, numbers in batches.items() if len(numbers) > 1}
