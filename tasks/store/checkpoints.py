"""Checkpoints of a run on S3: kept there, and on a machine's disk while a trainer writes or reads one.

A trainer writes and reads local folders. On S3 a checkpoint is complete with its marker, which is uploaded last.
"""

import shutil
from pathlib import Path

from tasks.errors import LeaseLostError
from tasks.store.filesystem import empty, files_of
from tasks.store.layout import CHECKPOINT_MARKER, S3, RunFolder, checkpoint_key
from tasks.store.manifest import read_manifest


def is_complete(folder: RunFolder, version: int) -> bool:
    """True when a run has the whole checkpoint of a version."""
    return bool(files_of(folder).keys(f"{checkpoint_key(version)}/{CHECKPOINT_MARKER}"))


def local_checkpoint(location: str) -> Path:
    """The folder on this machine of a checkpoint that lies in a folder or on S3.

    Example: s3://bucket/runs/a/checkpoints/version=000012 is .rollmill/scratch/bucket/runs/a/checkpoints/version=000012.
    """
    return RunFolder(location).local


def fetch_checkpoint(location: str) -> Path:
    """Bring a complete checkpoint to this machine unless it is there; returns its folder.

    Raises:
        ShardError: it is not there, or cannot be read.
        OSError: the disk cannot hold it.
    """
    local = local_checkpoint(location)
    if not location.startswith(S3):
        return local
    from tasks.store.s3 import objects_of

    stored, marker = objects_of(RunFolder(location)), local / CHECKPOINT_MARKER
    wanted = stored.get(CHECKPOINT_MARKER).content
    if marker.is_file() and marker.read_bytes() == wanted:
        return local
    remove_other_copies(local)
    empty(local)
    for key in stored.keys(""):
        if key != CHECKPOINT_MARKER:
            (local / key).parent.mkdir(parents=True, exist_ok=True)
            stored.download(key, local / key)
    marker.write_bytes(wanted)
    return local


def upload_checkpoint(folder: RunFolder, version: int, incarnation: int) -> None:
    """Store a checkpoint that lies whole on this machine, and let no older one stay here; nothing on a disk's run.

    `incarnation` is that of the trainer which uploads; before each request run.json is asked whether it is the newest.

    Raises:
        LeaseLostError: a newer trainer has loaded the run.
        StoreError: it could not be stored.
    """
    if folder.is_local:
        return
    from tasks.store.s3 import objects_of

    local, stored = folder.checkpoint(version), objects_of(RunFolder(folder.path(checkpoint_key(version))))
    keys = {path.relative_to(local).as_posix(): path for path in local.rglob("*") if path.is_file()}

    def check() -> None:
        newest = read_manifest(folder).incarnation
        if newest > incarnation:
            raise LeaseLostError(
                f"{stored.path('')} is not written by the trainer of incarnation {incarnation}: "
                f"one of incarnation {newest} has loaded the run"
            )

    stored.remove([CHECKPOINT_MARKER, *(key for key in stored.keys("") if key not in keys)], check)
    for key, path in keys.items():
        if key != CHECKPOINT_MARKER:
            stored.upload(path, key, check)
    stored.upload(keys[CHECKPOINT_MARKER], CHECKPOINT_MARKER, check)
    remove_other_copies(local)


def remove_other_copies(local: Path) -> None:
    """Remove the checkpoints beside one, which are copies of what lies on S3, or were never complete."""
    for each in local.parent.glob("version=*"):
        if each != local:
            shutil.rmtree(each)
