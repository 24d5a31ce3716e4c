"""Weights in files, for servers that load them from a folder or S3: LOCATION/NAME/00000-of-00002.safetensors, one per rank.

A snapshot is complete when it has as many files as their names say. It is not part of a run's data: it may be removed at
any time.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import S3_SCHEME, RunFolder

_SUFFIX = ".safetensors"


def weights_location(folder: RunFolder, run: str, configured: str) -> str:
    """Return the folder of a run's weight files: RUN/.tmp/weights, or `configured`/RUN_ID if `configured` is not empty."""
    return f"{configured.rstrip('/')}/{run}" if configured else f"{folder.absolute}/.tmp/weights"


def publish_rank_weights(
    place: str, name: str, rank: int, world_size: int, write: Callable[[Path], None]
) -> str:
    """Publish the weight file that `write` writes for one rank, whole or not at all; returns its path, raises StoreError."""

    def write_named(path: Path) -> str:
        write(path)
        return f"{rank:05d}-of-{world_size:05d}{_SUFFIX}"

    folder = RunFolder(place)
    return folder.path(open_files(folder).publish(name, write_named))


def list_complete_weights(place: str, name: str) -> list[str]:
    """List the paths of the files of the snapshot `name`; empty unless all ranks' files exist."""
    folder = RunFolder(place)
    keys = open_files(folder).keys(f"{name}/*{_SUFFIX}")
    is_whole = keys and all(int(key.removesuffix(_SUFFIX).rpartition("-")[2]) == len(keys) for key in keys)
    return [folder.path(key) for key in keys] if is_whole else []


def remove_weights(place: str, *, but: str = "") -> None:
    """Remove all weight snapshots of a location except those of one version, and what a killed process has not completed.

    Servers may still read others of that version: those called `but`, or `but`-ANYTHING.

    Nobody may be writing there.

    Raises:
        StoreError: names path and reason.
    """
    folder = RunFolder(place)
    files = open_files(folder)
    old = [
        key
        for key in files.keys(f"*/*{_SUFFIX}")
        if not but or not f"{key.partition('/')[0]}-".startswith(f"{but}-")
    ]
    files.remove(old)
    shutil.rmtree(folder.tmp, ignore_errors=True)
    for name in {key.partition("/")[0] for key in old}:
        # On S3 there are no folders.
        with suppress(OSError):
            (folder.local / name).rmdir()


def weight_urls(paths: Sequence[str], lifetime_s: float) -> list[str]:
    """Return where a server reads files: local paths unchanged, files on S3 by presigned URLs, valid for `lifetime_s` seconds."""
    if not any(path.startswith(S3_SCHEME) for path in paths):
        return list(paths)
    # s3fs and botocore take a second to import, and only weights on S3 need them.
    from rollmill.tasks.store.s3.s3_files import open_objects

    split = (path.rpartition("/") for path in paths)
    return [open_objects(RunFolder(folder)).address(name, lifetime_s) for folder, _, name in split]
