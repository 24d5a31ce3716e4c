"""Checkpoints and exported policies of a run: folders on this machine, for a run on S3 uploaded from and fetched to it.

A checkpoint is complete when it has its marker, which is written last. A policy is a Hugging Face folder: on a disk it is renamed
into place, on S3 config.json, without which nothing loads a folder as a model, is uploaded last.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rollmill.tasks.errors import LeaseLostError, StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import CheckpointMarker, StoredFile, parse_marker
from rollmill.tasks.store.filesystem import (
    describe_os_error,
    empty_folder,
    move_into_place,
    open_files,
    publish_path,
)
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder, checkpoint_key, policy_key
from rollmill.tasks.store.run.manifest import read_manifest

MODEL_CONFIG = "config.json"


def has_checkpoint(folder: RunFolder, version: int) -> bool:
    """Return True if the checkpoint of a version is stored and complete."""
    return bool(open_files(folder).keys(f"{checkpoint_key(version)}/{CHECKPOINT_MARKER}"))


def fetch_checkpoint(location: str) -> Path:
    """Download the missing files of a complete checkpoint on S3 for the run's trainer; returns its folder on this machine.

    A checkpoint on a disk is not copied. If the folder's marker is not that of the checkpoint on S3, the folder is emptied and
    other checkpoints next to it are removed: the run's one trainer needs the last one only.

    Raises:
        ShardError: the checkpoint does not exist, or cannot be read.
        StoreError: its marker is damaged.
        OSError: the files cannot be written to the disk.
    """
    folder = RunFolder(location)
    local = folder.local
    if folder.is_local:
        return local
    marker = local / CHECKPOINT_MARKER
    stored = _open_objects(folder)
    wanted = stored.get(CHECKPOINT_MARKER).content
    # Another marker is that of another write of this version: files of both must not be mixed.
    if not marker.is_file() or marker.read_bytes() != wanted:
        remove_other_copies(local)
        empty_folder(local)
    _download(stored, wanted, local)
    return local


def copy_checkpoint(location: str, scratch: Path) -> Path:
    """Return a folder with a complete checkpoint, for readers other than the run's trainer.

    A checkpoint on S3 is copied to the folder `scratch`; one on a disk is not copied.

    Raises:
        ShardError, StoreError, OSError: like `fetch_checkpoint`.
    """
    folder = RunFolder(location)
    if folder.is_local:
        return folder.local
    stored = _open_objects(folder)
    _download(stored, stored.get(CHECKPOINT_MARKER).content, scratch)
    return scratch


def clear_checkpoint(folder: RunFolder, version: int, incarnation: int) -> None:
    """Remove all existing files of a checkpoint that the trainer of an incarnation is about to write, on this machine and on S3.

    For a run on S3, other checkpoints on this machine are removed too, and run.json is checked before each request to S3.

    Raises:
        LeaseLostError: a newer trainer has loaded the run.
        StoreError: its folder could not be made.
    """
    local = folder.checkpoint(version)
    try:
        empty_folder(local)
    except OSError as error:
        raise StoreError(f"cannot write {local}: {describe_os_error(error)}") from error
    if folder.is_local:
        return
    remove_other_copies(local)
    stored, check = _open_for_trainer(folder, checkpoint_key(version), incarnation)
    # The marker first, so that no partial checkpoint counts as complete.
    stored.remove([CHECKPOINT_MARKER, *stored.keys("")], check)


def upload_checkpoint_file(folder: RunFolder, version: int, name: str, incarnation: int) -> None:
    """Upload one finished file of a checkpoint from this machine to S3; does nothing for a run on a local disk.

    Raises:
        LeaseLostError: a trainer newer than `incarnation` has loaded the run.
        StoreError: it could not be stored.
    """
    if not folder.is_local:
        stored, check = _open_for_trainer(folder, checkpoint_key(version), incarnation)
        stored.upload(folder.checkpoint(version) / name, name, check)


def publish_marker(folder: RunFolder, marker: CheckpointMarker, incarnation: int) -> None:
    """Write the marker of a checkpoint whose files are all stored, which makes it complete; errors as of `upload_checkpoint_file`."""
    with publish_path(folder.checkpoint(marker.version) / CHECKPOINT_MARKER) as path:
        path.write_bytes(marker.to_bytes())
    upload_checkpoint_file(folder, marker.version, CHECKPOINT_MARKER, incarnation)


def _open_for_trainer(folder: RunFolder, key: str, incarnation: int) -> tuple[Any, Callable[[], None]]:
    """Open the objects below a key of a run on S3, with the check to make before each request that changes one."""
    return _open_objects(RunFolder(folder.path(key))), partial(_check_newest, folder, key, incarnation)


def _check_newest(folder: RunFolder, key: str, incarnation: int) -> None:
    """Raise LeaseLostError if a newer trainer than number `incarnation`, which is to write `key`, has loaded the run."""
    newest = read_manifest(folder).incarnation
    if newest > incarnation:
        raise LeaseLostError(
            f"{folder.path(key)} is not written by the trainer of incarnation {incarnation}: one of incarnation "
            f"{newest} has loaded the run"
        )


def remove_other_copies(local: Path) -> None:
    """Remove all checkpoint folders next to the folder `local`: copies of what is on S3, or what never became complete."""
    for each in local.parent.glob("version=*"):
        if each != local:
            shutil.rmtree(each)


def _open_objects(folder: RunFolder) -> Any:
    # s3fs and botocore take a second to import, and only runs on S3 need them.
    from rollmill.tasks.store.s3.s3_files import open_objects

    return open_objects(folder)


def _download(stored: Any, marker: bytes, local: Path) -> None:
    """Download the files that a marker lists and the folder `local` lacks, then write the marker to that folder."""
    # A file of another size is what a killed download left.
    listed: Mapping[str, StoredFile] = parse_marker(marker, stored.path(CHECKPOINT_MARKER)).files or {}
    for name, recorded in listed.items():
        path = local / name
        if not path.is_file() or path.stat().st_size != recorded.bytes:
            path.parent.mkdir(parents=True, exist_ok=True)
            stored.download(name, path)
    (local / CHECKPOINT_MARKER).write_bytes(marker)


def has_policy(folder: RunFolder, version: int) -> bool:
    """Return True if all files of the policy of a version are stored."""
    return bool(open_files(folder).keys(f"{policy_key(version)}/{MODEL_CONFIG}"))


def staging_folder(folder: RunFolder, version: int) -> Path:
    """Return the folder on this machine where a policy is written before it is published."""
    return folder.tmp / f"policy-{version:06d}"


def publish_policy(folder: RunFolder, version: int, incarnation: int) -> str:
    """Publish the content of `staging_folder` as the policy of a version; returns its path, errors as of `upload_checkpoint_file`."""
    staged, key = staging_folder(folder, version), policy_key(version)
    if folder.is_local:
        target = folder.policy(version)
        try:
            move_into_place(staged, target)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {describe_os_error(error)}") from error
        return str(target)
    stored, check = _open_for_trainer(folder, key, incarnation)
    names = sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file())
    # False sorts before True: config.json, without which nothing loads the folder, comes last.
    for name in sorted(names, key=MODEL_CONFIG.__eq__):
        stored.upload(staged / name, name, check)
    shutil.rmtree(staged)
    return folder.path(key)
