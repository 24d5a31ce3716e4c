"""The files of a run on S3: one PUT per shard, and range requests for the parts of a shard that are read."""

import contextlib
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
from fsspec.utils import glob_translate

from rollmill.tasks.errors import ConfigError, LeaseLostError, ShardError, StoreError
from rollmill.tasks.store.filesystem import RangeFile, stage_path
from rollmill.tasks.store.folders import S3_SCHEME, RunFolder
from rollmill.tasks.store.s3.s3_errors import MissingObjectError, ObjectChangedError
from rollmill.tasks.store.s3.s3_objects import S3Objects

# Bytes read from the end of an object when it is opened (256 KiB): all of a small one, footer and last batch of a
# large one.
TAIL_BYTES = 256 << 10
# Least bytes of one range request (64 KiB), so that a batch's metadata and first columns come in one.
AHEAD_BYTES = 64 << 10

# Attempts at each request of `check_s3`: few, so that a wrong endpoint is reported soon.
PROBE_ATTEMPTS = 2


def open_objects(folder: RunFolder, attempts: int = 0) -> S3Objects:
    """Return access to a run's objects on S3, with at most `attempts` tries of a request; 0: as the environment says."""
    return S3Objects(folder.location.removeprefix(S3_SCHEME), attempts)


def check_s3(root: str) -> None:
    """Check that a root for runs on S3 can be written to and that its server supports conditional writes, by a probe object.

    Raises:
        ConfigError: names what is wrong and what to do.
    """
    objects, probe = open_objects(RunFolder(root), PROBE_ATTEMPTS), f".probe-{uuid.uuid4().hex}"
    try:
        etag = objects.put(probe, b"can this be written?")
        # A server that heeds conditions refuses both writes: the object exists, and has another etag.
        for replaces in (None, f'"{uuid.uuid4().hex}"'):
            with contextlib.suppress(ObjectChangedError, MissingObjectError):
                objects.put(probe, b"no condition was heeded", replaces=replaces)
                etag = ""
        objects.remove([probe])
    except StoreError as error:
        raise ConfigError("store.root", root, str(error)) from error
    if not etag:
        remedy = (
            "this S3 server ignores If-None-Match and If-Match on writes, which lock a run; "
            "use one that does, or a local disk"
        )
        raise ConfigError("store.root", root, remedy)


class S3Files:
    """The files of a run on S3, below s3://bucket/prefix; each appears whole, when its upload is complete.

    Methods block; they are called from threads.
    """

    reads_at_once = 16

    def __init__(self, folder: RunFolder, check: Callable[[], None]) -> None:
        self._objects, self._tmp, self._check = open_objects(folder), folder.tmp, check

    def publish(self, folder: str, write: Callable[[Path], str]) -> str:
        try:
            with stage_path(self._tmp) as staged:
                name = write(staged)
                key = f"{folder}/{name}" if folder else name
                self._objects.upload(staged, key, self._check)
        except OSError as error:
            where = self._objects.path(folder)
            raise StoreError(
                f"cannot write {where}, staged in {self._tmp}: {error.strerror or error}"
            ) from error
        return key

    def exchange(self, key: str, text: bytes, is_expected: Callable[[bytes | None], bool]) -> None:
        there = self._objects.find(key)
        self._check()
        if is_expected(there.content if there else None):
            try:
                self._objects.put(key, text, replaces=there.etag if there else None)
            except (ObjectChangedError, MissingObjectError):
                # Our own, if a response was lost and the request repeated.
                there = self._objects.find(key)
                if there and there.content == text:
                    return
            else:
                return
        raise LeaseLostError(
            f"{self._objects.path(key)} is not written: another process has taken the run over"
        )

    def keys(self, pattern: str) -> list[str]:
        return list(self.sizes(pattern))

    def sizes(self, pattern: str) -> dict[str, int]:
        # S3 lists by prefix alone; the rest of the pattern is matched here.
        start = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        matches = re.compile(glob_translate(pattern))
        return {key: size for key, size in self._objects.keys(start).items() if matches.match(key)}

    def open(self, key: str) -> pa.NativeFile:
        tail = self._objects.get(key, f"bytes=-{TAIL_BYTES}")
        if len(tail.content) == tail.size:
            return pa.BufferReader(tail.content)

        def fetch(start: int, end: int) -> tuple[int, bytes]:
            found = self._objects.get(key, f"bytes={start}-{end - 1}")
            # Ranges of two versions of an object would make a file that was never written.
            if found.etag != tail.etag or len(found.content) != end - start:
                raise ShardError(f"{self._objects.path(key)} was replaced while it was read")
            return start, found.content

        tail_at = tail.size - len(tail.content)
        return pa.PythonFile(RangeFile(fetch, tail_at, tail.content, AHEAD_BYTES), mode="r")

    def remove(self, keys: Iterable[str]) -> None:
        self._objects.remove(list(keys), self._check)
