"""The lock of a run on S3: a lease on the object RUN/lock, renewed while its holder lives.

The object is only replaced by conditional writes (If-None-Match, If-Match), so of two processes that want it one
gets it. It is free when it was released, when its lease has expired, or when its holder is known to have ended. The age of
a lease is measured by the server's clock alone: now, less the time when the object was written.
"""

import threading
import time
import uuid
from typing import Self

from pydantic import BaseModel, ValidationError

from rollmill.tasks.errors import LeaseLostError, RunLockedError, StoreError
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.lock import LockHolder
from rollmill.tasks.store.s3.s3_errors import MissingObjectError, ObjectChangedError
from rollmill.tasks.store.s3.s3_files import open_objects
from rollmill.tasks.store.s3.s3_objects import S3Object, S3Objects

LOCK_KEY = "lock"
# The lease is renewed after each third of it; nothing is written with less than a third left.
RENEWALS_PER_LEASE = 3
# S3 counts whole seconds: the age of an object is at most this many seconds too high.
CLOCK_RESOLUTION_S = 2.0
RETRY_S = 0.5
# Attempts at one request; a renewal that fails is tried again until the lease has expired.
ATTEMPTS = 2


class LeaseRecord(BaseModel):
    """The content of the object RUN/lock: which process holds the lease on a run, and for how long.

    Attributes:
        token: random, one per acquisition.
        renewals: number of renewals; since an etag is a hash of the content, no two contents may be equal.
        lease_s: seconds that the lease lasts after the object was written.
        is_free: True if the holder has released it.
    """

    token: str
    holder: LockHolder
    lease_s: float
    renewals: int = 0
    is_free: bool = False

    def remaining_s(self, age_s: float) -> float:
        """Return the seconds until another process may take the lock, written `age_s` seconds ago; zero or less: now."""
        if self.is_free or self.holder.is_known_dead():
            return 0.0
        return self.lease_s + CLOCK_RESOLUTION_S - age_s

    def to_bytes(self) -> bytes:
        """Serialize the lease as JSON text."""
        return self.model_dump_json(indent=2).encode() + b"\n"


def is_leased(folder: RunFolder) -> bool:
    """Return True if a process holds the lease on a run; raises StoreError if the server does not answer."""
    there = open_objects(folder, ATTEMPTS).find(LOCK_KEY)
    lease = _parse_lease(there)
    return bool(there and lease and lease.remaining_s(there.age_s) > 0.0)


def _read_clock() -> float:
    """Return seconds that pass also while the machine sleeps, as they do for other holders."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class S3Lease:
    """An exclusive lease on a run, renewed by a thread of this process until it is released or lost."""

    def __init__(self, objects: S3Objects, terms: LeaseRecord, etag: str, until: float) -> None:
        self._objects, self._terms, self._etag, self._until = objects, terms, etag, until
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost = ""
        self._renewals = threading.Thread(target=self._renew_until_ended, name="store-lease", daemon=True)
        self._renewals.start()

    @classmethod
    def acquire(cls, folder: RunFolder, lease_s: float, timeout_s: float) -> Self:
        """Take the lease on a run for `lease_s` seconds at a time; waits up to `timeout_s` seconds for another holder.

        Raises:
            RunLockedError: another process holds it for longer than `timeout_s` seconds.
            StoreError: the server does not answer, or refuses.
        """
        objects = open_objects(folder, ATTEMPTS)
        terms = LeaseRecord(token=uuid.uuid4().hex, holder=LockHolder.this_process(), lease_s=lease_s)
        deadline = _read_clock() + timeout_s
        while True:
            # The lease is counted from before the request, so that it ends here before it ends on the server.
            began = _read_clock()
            there = objects.find(LOCK_KEY)
            other = _parse_lease(there)
            left_s = other.remaining_s(there.age_s) if there and other else 0.0
            if left_s <= 0.0 and (taken := _write_lock(objects, terms, there.etag if there else None)):
                return cls(objects, *taken, began + lease_s)
            if _read_clock() >= deadline:
                raise RunLockedError(
                    f"{folder.location} is being written to by {other.holder if other else 'another process'}; "
                    f"end that one first, or give another name to begin a new run; if it was lost with its machine, "
                    f"the run can be resumed in {max(left_s, 1.0):.0f} s"
                )
            time.sleep(RETRY_S)

    def check(self) -> None:
        """Check that this process holds the lease, and renew it if needed; called before anything is written.

        Raises:
            LeaseLostError: another process has taken the run over, or this is a forked process.
            StoreError: the server does not answer, so nothing is known.
        """
        if self._lost or _read_clock() >= self._until - self._terms.lease_s / RENEWALS_PER_LEASE:
            self._renew()

    def release(self) -> None:
        self._ended.set()
        # Joined first: a renewal under way would give the object another etag than the release expects.
        if threading.current_thread() is not self._renewals and self._renewals.is_alive():
            self._renewals.join()
        with self._lock:
            if not self._lost:
                self._lost = "this process has released the run"
                try:
                    free = self._terms.model_copy(update={"is_free": True})
                    self._objects.put(LOCK_KEY, free.to_bytes(), replaces=self._etag)
                except StoreError:
                    # Then the lease expires, and whoever wants the run waits for that.
                    pass

    def forget(self) -> None:
        """Stop renewing the lease, and do not release it; called in a forked child, which has no renewing thread."""
        # A new lock, since the parent's thread may hold the old one, and no thread of the child would release it.
        self._lock, self._lost = threading.Lock(), "this is a forked process"
        self._ended.set()

    def _renew_until_ended(self) -> None:
        pause_s = self._terms.lease_s / RENEWALS_PER_LEASE
        while not self._ended.wait(pause_s):
            try:
                self._renew()
                pause_s = self._terms.lease_s / RENEWALS_PER_LEASE
            except LeaseLostError:
                return
            except StoreError:
                # A writer gets the error from `check`.
                pause_s = RETRY_S

    def _renew(self) -> None:
        with self._lock:
            if self._lost:
                raise LeaseLostError(f"{self._objects.path('')} is not written to: {self._lost}")
            began = _read_clock()
            terms = self._terms.model_copy(update={"renewals": self._terms.renewals + 1})
            renewed = _write_lock(self._objects, terms, self._etag)
            if renewed is None:
                other = _parse_lease(self._objects.find(LOCK_KEY))
                who = other.holder if other else "a process that has removed its lock"
                self._lost = (
                    f"{who} has taken the run over, since this process did not renew its lease in time"
                )
                raise LeaseLostError(f"{self._objects.path('')} is not written to: {self._lost}")
            (self._terms, self._etag), self._until = renewed, began + terms.lease_s


def _write_lock(
    objects: S3Objects, terms: LeaseRecord, replaces: str | None
) -> tuple[LeaseRecord, str] | None:
    """Write the lock if its etag is `replaces`, or create it if `replaces` is None.

    Returns the lock's content and new etag, or None if another process changed it.
    """
    for _ in range(ATTEMPTS + 1):
        try:
            return terms, objects.put(LOCK_KEY, terms.to_bytes(), replaces=replaces)
        except (ObjectChangedError, MissingObjectError):
            there = objects.find(LOCK_KEY)
            found = _parse_lease(there)
            if there is None or found is None or found.token != terms.token:
                return None
            # A response was lost, and the lock is ours already. It is replaced once more, so that its age is known.
            replaces, terms = there.etag, terms.model_copy(update={"renewals": found.renewals + 1})
    return None


def _parse_lease(there: S3Object | None) -> LeaseRecord | None:
    """Parse the content of a lock object; returns None if there is no lock, or it is damaged."""
    try:
        return LeaseRecord.model_validate_json(there.content) if there else None
    except ValidationError:
        return None
