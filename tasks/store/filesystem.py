"""The seam between the data sets and what stores them: six operations on keys, paths below the run's folder."""

import contextlib
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from tasks.errors import ShardError, ShardGoneError, StoreError
from tasks.store.layout import RunFolder


class Files(Protocol):
    """The files of one run. A key is a relative path: "rollouts/step=000012/000001-000000-9f86d081884c7d65.arrow".

    Attributes:
        reads_at_once: so many threads are worth their while for reading many small files.
    """

    reads_at_once: int

    def publish(self, folder: str, write: Callable[[Path], str]) -> str:
        """Make a file of what `write` puts into a new local file: whole or not at all.

        `write` returns the file's name in `folder`, a key too, "" for the run's own; a file of that name that is
        there already is replaced. Returns the key.

        Raises:
            StoreError: it could not be stored; names path and reason.
        """

    def exchange(self, key: str, text: bytes, is_expected: Callable[[bytes | None], bool]) -> None:
        """Make a small file of a text, or replace it, if what is there until then is what the run's holder expects.

        `is_expected` is given what is there, None for nothing. On a disk, where an flock cannot be lost, it is not asked.

        Raises:
            LeaseLostError: it is not, so another process has taken the run over; nothing is written.
            StoreError: it could not be stored; names path and reason.
        """

    def keys(self, pattern: str) -> list[str]:
        """The keys that match a glob pattern, sorted; empty when its folder is not there."""

    def sizes(self, pattern: str) -> dict[str, int]:
        """The size in bytes of each file that matches a glob pattern, by its key, sorted by it."""

    def open(self, key: str) -> pa.NativeFile:
        """Open a file for reading at any place.

        Raises:
            ShardGoneError: there is no such file; names its path.
            ShardError: it cannot be opened; names path and reason.
        """

    def remove(self, keys: Iterable[str]) -> None:
        """Remove files; those that are not there are no error.

        Raises:
            StoreError: one could not be removed; names path and reason.
        """


def files_of(folder: RunFolder, check: Callable[[], None] = lambda: None) -> Files:
    """The files of a run, by where its folder lies; those on S3 block, so they are used off the event loop.

    `check` is that of the run's lock: called before each request to S3 that changes anything, it may raise.
    """
    if folder.is_local:
        return LocalFiles(folder.local, folder.tmp)
    from tasks.store.s3 import S3Files  # s3fs and botocore are imported where a run lies on S3 alone

    return S3Files(folder, check)


def publish_text(files: Files, key: str, text: bytes) -> None:
    """Make a file of a text, or replace it.

    Raises:
        StoreError: it could not be stored.
    """
    folder, _, name = key.rpartition("/")

    def write(path: Path) -> str:
        path.write_bytes(text)
        return name

    files.publish(folder, write)


def read_text(files: Files, key: str) -> bytes:
    """All of a file; raises ShardError when it cannot be read."""
    with files.open(key) as source:
        return bytes(source.read())


class LocalFiles:
    """A folder on a local disk. A file is written in `tmp`, on the same disk, and renamed into place.

    A file that is published survives the death of the process, but not of the power: nothing is synced to disk.
    """

    reads_at_once = 1

    def __init__(self, root: Path, tmp: Path) -> None:
        self._root, self._tmp = root, tmp

    def publish(self, folder: str, write: Callable[[Path], str]) -> str:
        unfinished, target = self._tmp / uuid.uuid4().hex, self._root / folder
        try:
            name = write(unfinished)
            target.mkdir(parents=True, exist_ok=True)
            target /= name
            unfinished.rename(target)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {reason_of(error)}") from error
        finally:
            # Gone after a rename; when it cannot be removed, it is cleared when the run is opened again.
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        return f"{folder}/{name}" if folder else name

    def exchange(self, key: str, text: bytes, is_expected: Callable[[bytes | None], bool]) -> None:
        publish_text(self, key, text)

    def keys(self, pattern: str) -> list[str]:
        return sorted(path.relative_to(self._root).as_posix() for path in self._root.glob(pattern))

    def sizes(self, pattern: str) -> dict[str, int]:
        found = {}
        for key in self.keys(pattern):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                status = (self._root / key).stat()
                if not stat.S_ISDIR(status.st_mode):
                    found[key] = status.st_size
        return found

    def open(self, key: str) -> pa.NativeFile:
        path = self._root / key
        try:
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    return pa.BufferReader(b"")
                # Arrow's own map has the system fetch all that it passes over; this one what is used.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ShardGoneError(f"cannot read {path}: {reason_of(error)}") from error
        except OSError as error:
            raise ShardError(f"cannot read {path}: {reason_of(error)}") from error
        return pa.BufferReader(pa.py_buffer(mapped))

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._root / key
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"cannot remove {path}: {reason_of(error)}") from error


def empty(folder: Path) -> None:
    """Make a local folder, or empty it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def reason_of(error: OSError) -> str:
    """What the operating system says, without its number and path. Example: "No space left on device"."""
    return os.strerror(error.errno) if error.errno else str(error)
