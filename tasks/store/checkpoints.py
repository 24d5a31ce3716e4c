"""Checkpoints of a run on S3: kept there, and on a machine's disk while a trainer writes or reads one.

A trainer writes and reads local folders. On S3 a checkpoint is complete with its marker, which is uploaded last.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.errors import LeaseLostError, StoreError
from tasks.store.checkpoint_files import StoredFile, read_marker
from tasks.store.filesystem import empty, files_of, reason_of
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
    """Bring what is missing of a complete checkpoint to this machine; returns its folder.

    It is for the run's one trainer, which writes its checkpoints beside that folder: those that lie there go.

    Raises:
        ShardError: it is not there, or cannot be read.
        StoreError: its marker is damaged.
        OSError: the disk cannot hold it.
    """
    local = local_checkpoint(location)
    if not location.startswith(S3):
        return local
    from tasks.store.s3 import objects_of

    stored, marker = objects_of(RunFolder(location)), local / CHECKPOINT_MARKER
    wanted = stored.get(CHECKPOINT_MARKER).content
    files = read_marker(wanted, stored.path(CHECKPOINT_MARKER)).files or {}
    if not marker.is_file() or marker.read_bytes() != wanted:
        remove_other_copies(local)
        empty(local)
    _download(stored, files, local)
    marker.write_bytes(wanted)
    return local


def copy_checkpoint(location: str, scratch: Path) -> Path:
    """The folder of a complete checkpoint, for a reader beside the run's trainer: on S3 a copy of its own in `scratch`.

    Raises:
        ShardError, StoreError, OSError: as of `fetch_checkpoint`.
    """
    if not location.startswith(S3):
        return local_checkpoint(location)
    from tasks.store.s3 import objects_of

    stored = objects_of(RunFolder(location))
    wanted = stored.get(CHECKPOINT_MARKER).content
    _download(stored, read_marker(wanted, stored.path(CHECKPOINT_MARKER)).files or {}, scratch)
    (scratch / CHECKPOINT_MARKER).write_bytes(wanted)
    return scratch


def _download(stored: Any, files: Mapping[str, StoredFile], local: Path) -> None:
    """Fetch the files that a marker lists, those that are there left out."""
    for name, told in files.items():
        path = local / name
        if not path.is_file() or path.stat().st_size != told.bytes:
            path.parent.mkdir(parents=True, exist_ok=True)
            stored.download(name, path)


def clear_checkpoint(folder: RunFolder, version: int, incarnation: int) -> None:
    """Make room for a checkpoint that is to be written: nothing of an unfinished one stays, here or on S3.

    Args:
        folder: of the run.
        version: of the checkpoint.
        incarnation: that of the trainer which writes; before a request run.json is asked whether it is the newest.

    Raises:
        LeaseLostError: a newer trainer has loaded the run.
        StoreError: its place could not be made.
    """
    local = folder.checkpoint(version)
    try:
        empty(local)
    except OSError as error:
        raise StoreError(f"cannot write {local}: {reason_of(error)}") from error
    if folder.is_local:
        return
    remove_other_copies(local)
    stored = _objects(folder, version)
    check = partial(check_newest, folder, checkpoint_key(version), incarnation)
    stored.remove([CHECKPOINT_MARKER, *stored.keys("")], check)


def upload_file(folder: RunFolder, version: int, name: str, incarnation: int) -> None:
    """Store a file of a checkpoint that lies whole on this machine; nothing to do for a run on a disk.

    Raises:
        LeaseLostError: a newer trainer than that of `incarnation` has loaded the run.
        StoreError: it could not be stored.
    """
    if not folder.is_local:
        check = partial(check_newest, folder, checkpoint_key(version), incarnation)
        _objects(folder, version).upload(folder.checkpoint(version) / name, name, check)


def _objects(folder: RunFolder, version: int) -> Any:
    from tasks.store.s3 import objects_of

    return objects_of(RunFolder(folder.path(checkpoint_key(version))))


def check_newest(folder: RunFolder, key: str, incarnation: int) -> None:
    """Refuse a trainer when another has loaded the run since; raises LeaseLostError.

    Args:
        folder: of the run.
        key: of what is to be written.
        incarnation: of the trainer that would write it.
    """
    newest = read_manifest(folder).incarnation
    if newest > incarnation:
        raise LeaseLostError(
            f"{folder.path(key)} is not written by the trainer of incarnation {incarnation}: one of incarnation "
            f"{newest} has loaded the run"
        )


def remove_other_copies(local: Path) -> None:
    """Remove the checkpoints beside one, which are copies of what lies on S3, or were never complete."""
    for each in local.parent.glob("version=*"):
        if each != local:
            shutil.rmtree(each)
