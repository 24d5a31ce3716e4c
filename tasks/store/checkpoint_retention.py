"""Which checkpoints of a run are kept, and how one is removed: its marker first, so that no half of one ever counts."""

import shutil
from collections.abc import Sequence

from tasks.errors import StoreError
from tasks.store.filesystem import Files, reason_of
from tasks.store.layout import CHECKPOINT_MARKER, RunFolder, checkpoint_key
from tasks.store.resume import complete_checkpoints, stored_checkpoints


def expired_checkpoints(complete: Sequence[int], *, keep: int, keep_every: int) -> list[int]:
    """Versions whose checkpoints go: all but the newest `keep` and the multiples of `keep_every`, ascending.

    Args:
        complete: versions that have a complete checkpoint.
        keep: so many of the newest stay; 0: all.
        keep_every: multiples of this stay for good; 0: none does.

    Example: of 0, 10, 20, 30 and 40, with 2 to keep and every 20th, 10 goes.
    """
    if not keep:
        return []
    older = sorted(complete)[:-keep]
    return [version for version in older if not keep_every or version % keep_every]


def remove_checkpoints(folder: RunFolder, files: Files, *, keep: int, keep_every: int) -> list[int]:
    """Remove those that have expired, and what is left of unfinished ones before the newest; returns the versions.

    Raises:
        StoreError: one could not be removed, which is not complete any more by then, or is as it was.
    """
    complete = complete_checkpoints(folder)
    unfinished = set(stored_checkpoints(folder)) - set(complete)
    expired = expired_checkpoints(complete, keep=keep, keep_every=keep_every)
    gone = sorted({*expired, *(each for each in unfinished if complete and each < complete[-1])})
    for version in gone:
        _remove(folder, files, version)
    return gone


def _remove(folder: RunFolder, files: Files, version: int) -> None:
    key = checkpoint_key(version)
    files.remove([f"{key}/{CHECKPOINT_MARKER}"])
    if not folder.is_local:
        files.remove(files.keys(f"{key}/**/*"))
        return
    try:
        shutil.rmtree(folder.checkpoint(version))
    except OSError as error:
        raise StoreError(f"cannot remove {folder.path(key)}: {reason_of(error)}") from error
