"""The interface between the data sets and their storage: six operations on keys, which are paths below the run's folder."""

import contextlib
import errno
import io
import mmap
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from rollmill.tasks.config import check_extra
from rollmill.tasks.errors import ShardError, ShardGoneError, StoreError
from rollmill.tasks.store.folders import RunFolder

LIST_ATTEMPTS = 20
"""Attempts to list files while others remove folders."""


class Files(Protocol):
    """Storage of the files of one run, on a disk or on S3; a file's key is its path below the run's folder.

    Example of a key: "rollouts/step=000012/000001-000000-9f86d081884c7d65.arrow".

    Attributes:
        reads_at_once: threads that speed up reading many small files.
    """

    reads_at_once: int

    def publish(self, folder: str, write: Callable[[Path], str]) -> str:
        """Publish a file in the folder with a key ("": the run's own), whole or not at all; returns the file's key.

        `write` writes it to a new local path and returns its name; an existing file of that name is replaced.

        Raises:
            StoreError: it could not be stored; names path and reason.
        """

    def exchange(self, key: str, text: bytes, is_expected: Callable[[bytes | None], bool]) -> None:
        """Create or replace a small text file, if `is_expected` is True for its present content (None: there is no file).

        A local disk does not ask, since a run's lock cannot be lost there.

        Raises:
            LeaseLostError: another process has taken the run over; nothing is written.
            StoreError: it could not be stored; names path and reason.
        """

    def keys(self, pattern: str) -> list[str]:
        """List the keys that match a glob pattern, sorted; empty if the folder does not exist."""

    def sizes(self, pattern: str) -> dict[str, int]:
        """Return the size in bytes of each file that matches a glob pattern, by key, sorted by key."""

    def open(self, key: str) -> pa.NativeFile:
        """Open a file for random reads.

        Raises:
            ShardGoneError: there is no such file; names its path.
            ShardError: it cannot be opened; names path and reason.
        """

    def remove(self, keys: Iterable[str]) -> None:
        """Remove files, of which some may be missing; raises StoreError, which names path and reason, if one cannot be removed."""


def open_files(folder: RunFolder, check: Callable[[], None] = lambda: None) -> Files:
    """Return the storage of a run's files, on a local disk or on S3; its methods block the calling thread.

    `check` is called before each request to S3 that changes anything, and may raise; it is that of the run's lock.
    """
    if folder.is_local:
        return LocalFiles(folder.local, folder.tmp)
    check_extra("run", folder.location, "s3fs", "s3")
    # s3fs and botocore take a second to import, and only runs on S3 need them.
    from rollmill.tasks.store.s3.s3_files import S3Files

    return S3Files(folder, check)


def publish_text(files: Files, key: str, text: bytes) -> None:
    """Create or replace a text file; raises StoreError if it cannot be stored."""
    folder, _, name = key.rpartition("/")

    def write(path: Path) -> str:
        path.write_bytes(text)
        return name

    files.publish(folder, write)


def read_text(files: Files, key: str) -> bytes:
    """Return the content of a file as bytes; raises ShardError if it cannot be read."""
    with files.open(key) as source:
        return bytes(source.read())


@contextlib.contextmanager
def stage_path(folder: Path) -> Iterator[Path]:
    """Provide a new path in a local folder to write a file or folder to; removed at the end unless moved away."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / f".staged-{uuid.uuid4().hex}"
    try:
        yield staged
    finally:
        # An unremovable file in RUN/.tmp is removed when the run is opened again.
        with contextlib.suppress(OSError):
            shutil.rmtree(staged) if staged.is_dir() else staged.unlink(missing_ok=True)


def move_into_place(staged: Path, target: Path) -> None:
    """Rename a staged file or folder to its final path on the same disk; what exists there is replaced.

    The result survives the death of the process, but not a power failure: nothing is synced to disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if staged.is_dir() and target.is_dir():
        # A rename replaces a file, but no folder with content.
        shutil.rmtree(target)
    staged.rename(target)


@contextlib.contextmanager
def publish_path(target: Path) -> Iterator[Path]:
    """Provide a path to write a file or folder to, which is renamed to `target` when the block ends without an error.

    Example: with publish_path(folder / "COMPLETE.json") as path: path.write_text("{}")

    Raises:
        StoreError: an OSError in the block or in the rename; names path and reason.
    """
    try:
        with stage_path(target.parent) as staged:
            yield staged
            move_into_place(staged, target)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {describe_os_error(error)}") from error


class RangeFile(io.RawIOBase):
    """Remote file that Arrow can read: its last bytes, `tail` from `tail_at` on, are given; ranges before them are fetched.

    Args:
        fetch: given start and end, returns bytes that contain this range, and the position of the first of them.
        tail_at: position of `tail`.
        tail: the bytes from there to the end.
        least_bytes: smallest size of a fetched range, unless the tail begins before its end.

    Attributes:
        error: the last error of `fetch`; Arrow passes on the text of an exception, but not the exception.
    """

    def __init__(
        self, fetch: Callable[[int, int], tuple[int, bytes]], tail_at: int, tail: bytes, least_bytes: int
    ) -> None:
        self._fetch, self._tail_at, self._tail, self._least_bytes = fetch, tail_at, tail, least_bytes
        # Arrow reads from several threads, each of which seeks and then reads: each thread has a separate position.
        self._places, self._lock = threading.local(), threading.Lock()
        self._start, self._content = 0, b""
        self.error: ShardError | None = None

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return getattr(self._places, "at", 0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._places.at = base + offset
        return base + offset

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes from the calling thread's position; the rest of the file if `size` is negative or None."""
        start = self.tell()
        end = self._size if size is None or size < 0 else min(start + size, self._size)
        self._places.at = max(start, end)
        head = self._read_head(start, min(end, self._tail_at)) if start < min(end, self._tail_at) else b""
        return head + self._tail[max(start - self._tail_at, 0) : max(end - self._tail_at, 0)]

    @property
    def _size(self) -> int:
        return self._tail_at + len(self._tail)

    def _read_head(self, start: int, end: int) -> bytes:
        with self._lock:
            if not self._start <= start <= end <= self._start + len(self._content):
                ahead = min(max(end, start + self._least_bytes), self._tail_at)
                try:
                    self._start, self._content = self._fetch(start, ahead)
                except ShardError as error:
                    self.error = error
                    raise
            return self._content[start - self._start : end - self._start]


class LocalFiles:
    """Files of a run in a folder on a local disk; each is written in the folder `tmp` on the same disk, then renamed."""

    reads_at_once = 1

    def __init__(self, root: Path, tmp: Path) -> None:
        self._root, self._tmp = root, tmp

    def publish(self, folder: str, write: Callable[[Path], str]) -> str:
        try:
            with stage_path(self._tmp) as staged:
                name = write(staged)
                move_into_place(staged, self._root / folder / name)
        except OSError as error:
            raise StoreError(f"cannot write {self._root / folder}: {describe_os_error(error)}") from error
        return f"{folder}/{name}" if folder else name

    def exchange(self, key: str, text: bytes, is_expected: Callable[[bytes | None], bool]) -> None:
        # `is_expected` is not asked: an flock cannot be lost, so no other process has written in between.
        publish_text(self, key, text)

    def keys(self, pattern: str) -> list[str]:
        for _ in range(LIST_ATTEMPTS - 1):
            # A folder of a removed checkpoint may vanish while it is listed.
            with contextlib.suppress(FileNotFoundError):
                return self._list(pattern)
        return self._list(pattern)

    def _list(self, pattern: str) -> list[str]:
        return sorted(path.relative_to(self._root).as_posix() for path in self._root.glob(pattern))

    def sizes(self, pattern: str) -> dict[str, int]:
        found = {}
        for key in self.keys(pattern):
            try:
                status = (self._root / key).stat()
            except OSError as error:
                # Removed since it was listed; or a link that leads to itself, which is no file, as one that leads nowhere is none.
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                continue
            if not stat.S_ISDIR(status.st_mode):
                found[key] = status.st_size
        return found

    def open(self, key: str) -> pa.NativeFile:
        path = self._root / key
        try:
            # Opening a named pipe would wait for its writer; without waiting it is a file without bytes.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                if not os.fstat(file.fileno()).st_size:
                    return pa.BufferReader(b"")
                # Arrow's own map prefetches everything it passes over; this one loads only the pages that are used.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ShardGoneError(f"cannot read {path}: {describe_os_error(error)}") from error
        except OSError as error:
            raise ShardError(f"cannot read {path}: {describe_os_error(error)}") from error
        return pa.BufferReader(pa.py_buffer(mapped))

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._root / key
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"cannot remove {path}: {describe_os_error(error)}") from error


def empty_folder(folder: Path) -> None:
    """Remove everything in a local folder; the folder is created if it does not exist."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def describe_os_error(error: OSError) -> str:
    """Return the operating system's message of an error, without number and path. Example: "No space left on device"."""
    return os.strerror(error.errno) if error.errno else str(error)
