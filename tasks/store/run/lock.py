"""The lock of a run, which only one process writes to: an flock on a disk, a lease on S3."""

import contextlib
import errno
import fcntl
import os
import socket
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, Self

from pydantic import BaseModel

from rollmill.tasks.errors import ConfigError, RollmillError, RunLockedError, StoreError
from rollmill.tasks.processes.machine import machine_id, process_start
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import describe_os_error, empty_folder
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder

# Seconds to wait for another process to release a run: one that was just stopped needs a moment to end.
LOCK_TIMEOUT_S = 10.0
# Seconds without renewal after which another machine may take over a run on S3; it is renewed three times as often. A late write
# of the former holder, of at most 20 seconds, has been decided long before.
LEASE_S = 60.0
# Seconds between two attempts at the flock, which cannot wait with a timeout.
RETRY_S = 0.05

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class LockHolder(BaseModel):
    """Identity of a process, as a run's lock records it: pid, host, machine and start.

    Attributes:
        machine: boot id and process namespace of the process's machine; empty if unknown.
        began: start of the process in clock ticks since the boot; empty if unknown.
    """

    pid: int
    host: str
    machine: str = ""
    began: str = ""

    @classmethod
    def this_process(cls) -> Self:
        """Return the identity of the calling process."""
        pid, machine = os.getpid(), ""
        # Without /proc other processes cannot detect that this one has ended: they wait until its lease expires.
        with contextlib.suppress(OSError):
            machine = machine_id()
        return cls(pid=pid, host=socket.gethostname(), machine=machine, began=process_start(pid))

    def is_known_dead(self) -> bool:
        """Return True if the process ran on this machine and has ended; False also if that cannot be known from here."""
        here = self.this_process().machine
        # A pid is given again after some time; pid and start together are one process.
        return bool(here) and self.machine == here and process_start(self.pid) != self.began

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock(Protocol):
    """Lock on a run, which only its holder writes to; held until it is released or the process ends."""

    def check(self) -> None:
        """Raise LeaseLostError if another process has taken the run over; called before anything is written."""

    def release(self) -> None:
        """Release the lock; may be called twice."""

    def forget(self) -> None:
        """Drop this process's copy of the lock; called in a forked child, since only the parent holds the lock."""


def lock_run(
    folder: RunFolder,
    config: StoreConfig,
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
    lease_s: float = LEASE_S,
) -> RunLock:
    """Create a run's folder if needed, lock it, and remove the staged files of an earlier writer.

    It waits `timeout_s` seconds for another process to release the run; a lease on S3 lasts `lease_s` seconds without renewal.

    Raises:
        ConfigError: the folder cannot be written.
        StoreError: the disk is full, or the S3 server does not answer or refuses.
        RunLockedError: another process holds the lock for longer than `timeout_s`.
    """
    lock: RunLock
    if folder.is_local:
        lock = FolderLock.acquire(folder, config.root, timeout_s)
    else:
        # s3fs and botocore take a second to import, and only runs on S3 need them.
        from rollmill.tasks.store.s3.s3_lease import S3Lease

        lock = S3Lease.acquire(folder, lease_s, timeout_s)
    _held_locks.add(lock)
    # Only now: before, they could have been another writer's, who is still at work.
    try:
        empty_folder(folder.tmp)
    except OSError as error:
        lock.release()
        raise unwritable_error(error, folder, config.root) from error
    return lock


def is_written_to(folder: RunFolder) -> bool:
    """Return True if a process holds the lock of a run; False also if that cannot be known from here. Nothing is written.

    Raises:
        StoreError: the S3 server does not answer.
    """
    if not folder.is_local:
        from rollmill.tasks.store.s3.s3_lease import is_leased

        return is_leased(folder)
    try:
        with folder.lock.open("rb") as file:
            # Shared, so that two that ask do not see each other; a process that wants the run tries again.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # There is no lock, as in a copy of a run, or another user has made it.
        return False
    return False


def lock_writer(folder: RunFolder, name: str, timeout_s: float = LOCK_TIMEOUT_S) -> RunLock:
    """Lock the file RUN/writers/NAME for a process that writes to a run which another process has locked.

    Raises:
        RunLockedError: a process of that name still lives after `timeout_s`.
        ConfigError, StoreError: as for `lock_run`.
    """
    lock = FolderLock.acquire(folder, folder.location, timeout_s, folder.writers / name)
    _held_locks.add(lock)
    return lock


def await_writers(folder: RunFolder, names: Iterable[str] = (), timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Wait until these processes with a lock of `lock_writer` have ended; no name: all of them. Their files are removed.

    Call it once none of them can start any more: by its run's lock, and an epoch in run.json that is not theirs.

    Raises:
        RunLockedError: one still lives after `timeout_s`; it would store rows that others make meanwhile.
    """
    if not folder.is_local or not folder.writers.is_dir():
        return
    for path in [folder.writers / name for name in names] or sorted(folder.writers.iterdir()):
        if path.exists():
            FolderLock.acquire(folder, folder.location, timeout_s, path).release()
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        # Others may have files in it.
        folder.writers.rmdir()


class FolderLock:
    """An exclusive flock on RUN/lock, or on a file of RUN/writers, held until it is released or the process ends, killed included."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, folder: RunFolder, root: str, timeout_s: float, path: Path | None = None) -> Self:
        """Create the run's folder if needed, and lock it; errors and `timeout_s` as for `lock_run`, which name the setting store.root.

        `path` is the file to lock; None: RUN/lock.
        """
        path, deadline = path or folder.lock, time.monotonic() + timeout_s
        while True:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.ExitStack() as on_failure:
                    # Whoever can read a file can lock it.
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                    on_failure.callback(os.close, descriptor)
                    _wait_for_lock(descriptor, path, folder, deadline)
                    # The folder may have been renamed meanwhile, with its lock. Some file systems give a file another number at each look.
                    if _is_file_at(descriptor, path) or time.monotonic() >= deadline:
                        # For the error of a process that finds the run locked; the lock itself is the kernel's.
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, LockHolder.this_process().model_dump_json().encode(), 0)
                        on_failure.pop_all()
                        return cls(descriptor)
            except OSError as error:
                raise unwritable_error(error, folder, root) from error
            time.sleep(RETRY_S)

    def check(self) -> None:
        """Do nothing: a held flock cannot be lost."""

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # The child's copy of the descriptor would keep the lock after the parent's death.
            os.close(descriptor)


def unwritable_error(error: OSError, folder: RunFolder, root: str) -> RollmillError:
    """Return the error for an unwritable folder: StoreError if the disk is full, else ConfigError that names the setting."""
    where, reason = error.filename or folder.location, describe_os_error(error)
    if error.errno in _DISK_FULL:
        return StoreError(f"cannot write {where}: {reason}")
    if not folder.is_local:
        scratch = str(folder.local)
        return ConfigError(
            SCRATCH_ENV, scratch, f"{where} cannot be written: {reason}; name a folder that can"
        )
    return ConfigError("store.root", root, f"{where} cannot be written: {reason}; name a folder that can")


# Weak, so that the set does not grow with each run that this process opens.
_held_locks: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held_locks):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _wait_for_lock(descriptor: int, path: Path, folder: RunFolder, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = "an unknown process"
                with contextlib.suppress(OSError, ValueError):
                    # It has not written its name yet.
                    holder = str(LockHolder.model_validate_json(path.read_text()))
                raise RunLockedError(
                    f"{folder.location} is being written to by {holder}; end that one first, "
                    "or give another name to begin a new run"
                ) from None
            time.sleep(RETRY_S)
        else:
            return
