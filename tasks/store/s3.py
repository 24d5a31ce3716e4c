"""The files of a run on S3: one PUT a shard, ranges of a shard read as they are wanted."""

import contextlib
import io
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
from fsspec.utils import glob_translate

from tasks.errors import ConfigError, LeaseLostError, ShardError, StoreError
from tasks.store.layout import S3, RunFolder
from tasks.store.objects import Object, Objects
from tasks.store.s3_errors import MissingObjectError, ObjectChangedError

TAIL_BYTES = 256 << 10
"""Read of an object when it is opened: all of a small one, of a large one the footer and what is near it."""
AHEAD_BYTES = 64 << 10
"""Read at least with one request: the metadata of a record batch and its first columns, for example."""


PROBE_ATTEMPTS = 2
"""At each request before anything is started: a wrong endpoint is to be said soon."""


def objects_of(folder: RunFolder) -> Objects:
    """The objects of a run on S3."""
    return Objects(folder.location.removeprefix(S3))


def check_s3(root: str) -> None:
    """Refuse a place for runs on S3 that cannot be written to, or whose server has no locks; writes and removes there.

    Raises:
        ConfigError: names what is wrong and what to do.
    """
    objects, probe = Objects(root.removeprefix(S3).rstrip("/"), PROBE_ATTEMPTS), f".probe-{uuid.uuid4().hex}"
    try:
        etag = objects.put(probe, b"can this be written?")
        for replaces in (None, f'"{uuid.uuid4().hex}"'):
            with contextlib.suppress(ObjectChangedError, MissingObjectError):
                objects.put(probe, b"no condition was heeded", replaces=replaces)
                etag = ""
        objects.remove([probe])
    except StoreError as error:
        raise ConfigError("store.root", root, str(error)) from error
    if not etag:
        remedy = (
            "this S3 server does not heed If-None-Match and If-Match when it writes, by which a run is locked; "
            "use one that does, or a local disk"
        )
        raise ConfigError("store.root", root, remedy)


class S3Files:
    """Files below s3://bucket/prefix. An object appears whole, or not at all, when its upload is complete.

    Methods block; they are called from threads.
    """

    reads_at_once = 16

    def __init__(self, folder: RunFolder, check: Callable[[], None]) -> None:
        self._objects, self._tmp, self._check = objects_of(folder), folder.tmp, check

    def publish(self, folder: str, write: Callable[[Path], str]) -> str:
        unfinished = self._tmp / uuid.uuid4().hex
        try:
            self._tmp.mkdir(parents=True, exist_ok=True)
            name = write(unfinished)
            key = f"{folder}/{name}" if folder else name
            self._objects.upload(unfinished, key, self._check)
        except OSError as error:
            where = self._objects.path(folder)
            raise StoreError(
                f"cannot write {where}, by way of {unfinished}: {error.strerror or error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        return key

    def exchange(self, key: str, text: bytes, is_expected: Callable[[bytes | None], bool]) -> None:
        there = self._there(key)
        self._check()
        if is_expected(there.content if there else None):
            try:
                self._objects.put(key, text, replaces=there.etag if there else None)
            except (ObjectChangedError, MissingObjectError):
                there = self._there(key)  # ours, when an answer was lost and the request sent again
                if there and there.content == text:
                    return
            else:
                return
        raise LeaseLostError(
            f"{self._objects.path(key)} is not written: another process has taken the run over"
        )

    def _there(self, key: str) -> Object | None:
        try:
            return self._objects.get(key)
        except MissingObjectError:
            return None

    def keys(self, pattern: str) -> list[str]:
        return list(self.sizes(pattern))

    def sizes(self, pattern: str) -> dict[str, int]:
        start = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        matches = re.compile(glob_translate(pattern))
        return {key: size for key, size in self._objects.keys(start).items() if matches.match(key)}

    def open(self, key: str) -> pa.NativeFile:
        tail = self._objects.get(key, f"bytes=-{TAIL_BYTES}")
        if len(tail.content) == tail.size:
            return pa.BufferReader(tail.content)
        return pa.PythonFile(RangeReader(self._objects, key, tail.etag, tail.size, tail.content), mode="r")

    def remove(self, keys: Iterable[str]) -> None:
        self._objects.remove(list(keys), self._check)


class RangeReader(io.RawIOBase):
    """Reads an object at any place, a request each, unless the bytes are near those that were read before."""

    def __init__(self, objects: Objects, key: str, etag: str, size: int, tail: bytes) -> None:
        self._objects, self._key, self._etag, self._size = objects, key, etag, size
        self._at = 0
        self._tail = self._ahead = (size - len(tail), tail)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read from where it stands; all that is left when `size` is negative or None.

        Raises:
            ShardError: it cannot be read, or has been replaced since it was opened.
        """
        start = self._at
        end = self._size if size is None or size < 0 else min(start + size, self._size)
        if end <= start:
            return b""
        self._at = end
        for place, piece in (self._ahead, self._tail):
            if place <= start and end <= place + len(piece):
                return piece[start - place : end - place]
        last = min(max(end, start + AHEAD_BYTES), self._size)
        found = self._objects.get(self._key, f"bytes={start}-{last - 1}")
        if found.etag != self._etag or len(found.content) != last - start:
            raise ShardError(f"{self._objects.path(self._key)} was replaced while it was read")
        if last > end:
            self._ahead = (start, found.content)
        return found.content[: end - start]
