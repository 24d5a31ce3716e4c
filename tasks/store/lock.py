"""The lock of a run: one process writes to it. An flock on a disk, a lease on S3."""

import contextlib
import errno
import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Protocol, Self

from tasks.errors import ConfigError, RollmillError, RunLockedError, StoreError
from tasks.store.config import StoreConfig
from tasks.store.filesystem import empty, reason_of
from tasks.store.holder import Holder
from tasks.store.layout import SCRATCH_ENV, RunFolder

RETRY_S = 0.05
"""flock cannot wait for a bounded time, so it is tried this often."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class RunLock(Protocol):
    """A hold on a run, until it is released or the process ends."""

    def check(self) -> None:
        """Called before anything is written.

        Raises:
            LeaseLostError: another process has taken the run over, and nothing may be written.
        """

    def release(self) -> None:
        """Let another process have the run; may be called twice."""

    def forget(self) -> None:
        """Called in a forked child: the hold is the parent's alone."""


def lock_run(folder: RunFolder, config: StoreConfig) -> RunLock:
    """Make the run's folder when it is not there, lock it, and remove what an earlier writer left unfinished.

    Raises:
        ConfigError: the folder cannot be written.
        StoreError: the disk is full, or the S3 server does not answer or refuses.
        RunLockedError: another process holds it for longer than store.lock_timeout_s.
    """
    lock: RunLock
    if folder.is_local:
        lock = FolderLock.acquire(folder, config.root, config.lock_timeout_s)
    else:
        from tasks.store.lease import Lease  # s3fs and botocore are imported where a run lies on S3 alone

        lock = Lease.acquire(folder, config.lease_s, config.lock_timeout_s)
    _held.add(lock)
    try:
        empty(folder.tmp)
    except OSError as error:
        lock.release()
        raise unwritable(error, folder, config.root) from error
    return lock


class FolderLock:
    """An exclusive flock on RUN/lock, held until it is released or the process ends, killed included."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, folder: RunFolder, root: str, timeout_s: float) -> Self:
        """Make the folder when it is not there, and lock it.

        `root` is the setting store.root, for the error.

        Raises:
            ConfigError: the folder cannot be written.
            StoreError: the disk is full.
            RunLockedError: another process holds the lock for longer than `timeout_s` seconds.
        """
        try:
            folder.local.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as on_failure:
                descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
                on_failure.callback(os.close, descriptor)
                _wait(descriptor, folder, timeout_s)
                _write_holder(descriptor)
                on_failure.pop_all()
        except OSError as error:
            raise unwritable(error, folder, root) from error
        return cls(descriptor)

    def check(self) -> None:
        """An flock cannot be lost."""

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        """Close the child's copy of the descriptor, which would hold the lock beyond the parent's death."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def unwritable(error: OSError, folder: RunFolder, root: str) -> RollmillError:
    """A full disk is the store's trouble; any other reason is a wrong setting."""
    where, reason = error.filename or folder.location, reason_of(error)
    if error.errno in _DISK_FULL:
        return StoreError(f"cannot write {where}: {reason}")
    if not folder.is_local:
        scratch = str(folder.local)
        return ConfigError(
            SCRATCH_ENV, scratch, f"{where} cannot be written: {reason}; name a folder that can"
        )
    return ConfigError("store.root", root, f"{where} cannot be written: {reason}; name a folder that can")


_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


def _wait(descriptor: int, folder: RunFolder, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise RunLockedError(
                    f"{folder.location} is being written to by {_holder(folder.lock)}; end that one first, "
                    "or give another name to begin a new run"
                ) from None
            time.sleep(RETRY_S)
        else:
            return


def _write_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, Holder.this_process().model_dump_json().encode(), 0)


def _holder(lock: Path) -> str:
    try:
        return str(Holder.model_validate_json(lock.read_text()))
    except (OSError, ValueError):
        return "a process that has not said who it is"
