"""The seam between the data sets and what stores them: four operations on keys, paths below the run's folder."""

import contextlib
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import polars as pl
import pyarrow as pa

from tasks.errors import ShardError, StoreError
from tasks.store.layout import RunFolder


class Files(Protocol):
    """The files of one run. A key is a relative path: "rollouts/step=000012/000001-000000.arrow"."""

    def publish(self, key: str, write: Callable[[pa.NativeFile], object]) -> None:
        """Make a file of what `write` puts into the sink: whole or not at all.

        Raises:
            StoreError: it could not be stored; names path and reason.
        """

    def keys(self, pattern: str) -> list[str]:
        """The keys that match a glob pattern, sorted; empty when its folder is not there."""

    def open(self, key: str) -> pa.NativeFile:
        """Open a file for reading at any place.

        Raises:
            ShardError: it cannot be opened; names path and reason.
        """

    def scan(self, keys: Sequence[str]) -> pl.LazyFrame:
        """The rows of one or more shards, read when collected."""


def files_of(folder: RunFolder) -> Files:
    """The files of a run, by where its folder lies."""
    return LocalFiles(folder.root, folder.tmp)


class LocalFiles:
    """A folder on a local disk. A file is written in `tmp`, on the same disk, and renamed into place.

    A file that is published survives the death of the process, but not of the power: nothing is synced to disk.
    """

    def __init__(self, root: Path, tmp: Path) -> None:
        self._root, self._tmp = root, tmp

    def publish(self, key: str, write: Callable[[pa.NativeFile], object]) -> None:
        target = self._root / key
        unfinished = self._tmp / f"{uuid.uuid4().hex}-{target.name}"
        try:
            with pa.OSFile(str(unfinished), "wb") as sink:
                write(sink)
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished.rename(target)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {reason_of(error)}") from error
        finally:
            # Gone after a rename; when it cannot be removed, it is cleared when the run is opened again.
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def keys(self, pattern: str) -> list[str]:
        return sorted(path.relative_to(self._root).as_posix() for path in self._root.glob(pattern))

    def open(self, key: str) -> pa.NativeFile:
        path = self._root / key
        try:
            return pa.memory_map(str(path))
        except OSError as error:
            raise ShardError(f"cannot read {path}: {reason_of(error)}") from error

    def scan(self, keys: Sequence[str]) -> pl.LazyFrame:
        return pl.scan_ipc([self._root / key for key in keys], hive_partitioning=False)


def reason_of(error: OSError) -> str:
    """What the operating system says, without its number and path. Example: "No space left on device"."""
    return os.strerror(error.errno) if error.errno else str(error)
