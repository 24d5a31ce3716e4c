"""Which checkpoints of a run are kept. The others are removed, their marker first, so that no partial one counts."""

import shutil
from collections.abc import Sequence

from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.filesystem import Files, describe_os_error
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder, checkpoint_key
from rollmill.tasks.store.run.resume import list_checkpoints, list_complete_checkpoints


def select_expired_checkpoints(complete: Sequence[int], *, keep: int, keep_every: int) -> list[int]:
    """Return the versions, ascending, whose checkpoints are to be removed, of those that have a complete checkpoint.

    The newest `keep` are kept (0: all), and for good the multiples of `keep_every` (0: none).

    Example: of 0, 10, 20, 30 and 40, with keep=2 and keep_every=20, 10 is removed.
    """
    if not keep:
        return []
    older = sorted(complete)[:-keep]
    return [version for version in older if not keep_every or version % keep_every]


def remove_checkpoints(folder: RunFolder, files: Files, *, keep: int, keep_every: int) -> list[int]:
    """Remove expired checkpoints, and incomplete ones older than the newest complete one; returns the removed versions.

    Raises StoreError if a checkpoint could not be removed; it is then incomplete or unchanged.
    """
    complete = list_complete_checkpoints(folder)
    unfinished = set(list_checkpoints(folder)) - set(complete)
    expired = select_expired_checkpoints(complete, keep=keep, keep_every=keep_every)
    gone = sorted({*expired, *(each for each in unfinished if complete and each < complete[-1])})
    for version in gone:
        key = checkpoint_key(version)
        # First, so that a kill leaves an incomplete checkpoint and never a complete one without some of its files.
        files.remove([f"{key}/{CHECKPOINT_MARKER}"])
        if not folder.is_local:
            files.remove(files.keys(f"{key}/**/*"))
            continue
        try:
            shutil.rmtree(folder.checkpoint(version))
        except OSError as error:
            raise StoreError(f"cannot remove {folder.path(key)}: {describe_os_error(error)}") from error
    return gone
