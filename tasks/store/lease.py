"""The lock of a run on S3: a lease on the object RUN/lock, renewed while its holder lives.

The object is only ever replaced by who knows what it replaces (If-None-Match, If-Match), so of two that want it one
gets it. It is free when it was given back, when its lease has run out, or when its holder is known to have ended.
A lease's age is the server's: its clock now, less its clock when the object was written; no other clock is compared.
"""

import threading
import time
import uuid
from typing import Self

from pydantic import BaseModel, ValidationError

from tasks.errors import LeaseLostError, RunLockedError, StoreError
from tasks.store.holder import Holder
from tasks.store.layout import RunFolder
from tasks.store.objects import Object, Objects
from tasks.store.s3 import objects_of
from tasks.store.s3_errors import MissingObjectError, ObjectChangedError

LOCK = "lock"
PARTS = 3
"""The lease is renewed whenever a third of it has passed; a writer begins nothing with less than a third left."""
CLOCK_S = 2.0
"""S3 counts whole seconds: an age that it gives is at most this much too high."""
RETRY_S = 0.5
ATTEMPTS = 2
"""At one request; what fails is tried again until the lease has run out."""


class Terms(BaseModel):
    """What RUN/lock says.

    Attributes:
        token: of the holder's hold, random.
        renewals: rises with each, so that no two contents are equal.
        lease_s: seconds for which the hold lasts after the object was written.
        is_free: True when the holder has given it back.
    """

    token: str
    holder: Holder
    lease_s: float
    renewals: int = 0
    is_free: bool = False

    def left_s(self, age_s: float) -> float:
        """Seconds until another may take it; zero or less: now."""
        if self.is_free or self.holder.is_known_dead():
            return 0.0
        return self.lease_s + CLOCK_S - age_s


class Lease:
    """An exclusive hold on a run, renewed by a thread of this process until it is given back or lost."""

    def __init__(self, objects: Objects, terms: Terms, etag: str, until: float) -> None:
        self._objects, self._terms, self._etag, self._until = objects, terms, etag, until
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._lost = ""
        self._beats = threading.Thread(target=self._beat, name="store-lease", daemon=True)
        self._beats.start()

    @classmethod
    def acquire(cls, folder: RunFolder, lease_s: float, timeout_s: float) -> Self:
        """Take the lease.

        Raises:
            RunLockedError: another process holds it for longer than `timeout_s` seconds.
            StoreError: the server does not answer, or refuses.
        """
        objects = Objects(objects_of(folder).root, ATTEMPTS)
        terms = Terms(token=uuid.uuid4().hex, holder=Holder.this_process(), lease_s=lease_s)
        deadline = time.monotonic() + timeout_s
        while True:
            began = time.monotonic()
            there = _there(objects)
            other = _terms_of(there)
            left_s = other.left_s(there.age_s) if there and other else 0.0
            if left_s <= 0.0 and (taken := _put(objects, terms, there.etag if there else None)):
                return cls(objects, *taken, began + lease_s)
            if time.monotonic() >= deadline:
                raise RunLockedError(
                    f"{folder.location} is being written to by {other.holder if other else 'another process'}; "
                    f"end that one first, or give another name to begin a new run; if it was lost with its machine, "
                    f"the run can be gone on with in {max(left_s, 1.0):.0f} s"
                )
            time.sleep(RETRY_S)

    def check(self) -> None:
        """Called before anything is written: returns while the hold is certain, if need be after renewing it.

        Raises:
            LeaseLostError: another process has taken the run over, or this is a forked one.
            StoreError: that cannot be told, since the server does not answer.
        """
        if self._lost or time.monotonic() >= self._until - self._terms.lease_s / PARTS:
            self._renew()

    def release(self) -> None:
        """Give it back; may be called twice."""
        self._ended.set()
        if threading.current_thread() is not self._beats and self._beats.is_alive():
            self._beats.join()
        with self._turn:
            if not self._lost:
                self._lost = "this process has given the run back"
                try:
                    free = self._terms.model_copy(update={"is_free": True})
                    self._objects.put(LOCK, _content(free), replaces=self._etag)
                except StoreError:
                    pass  # then the lease runs out by itself, and who wants the run waits for that

    def forget(self) -> None:
        """In a forked child, which has no thread to renew it: neither renewed nor given back from here."""
        self._turn, self._lost = threading.Lock(), "this is a forked process"
        self._ended.set()

    def _beat(self) -> None:
        pause_s = self._terms.lease_s / PARTS
        while not self._ended.wait(pause_s):
            try:
                self._renew()
                pause_s = self._terms.lease_s / PARTS
            except LeaseLostError:
                return
            except StoreError:
                pause_s = RETRY_S  # whoever writes is told by `check`

    def _renew(self) -> None:
        with self._turn:
            if self._lost:
                raise LeaseLostError(f"{self._objects.path('')} is not written to: {self._lost}")
            began = time.monotonic()
            terms = self._terms.model_copy(update={"renewals": self._terms.renewals + 1})
            renewed = _put(self._objects, terms, self._etag)
            if renewed is None:
                other = _terms_of(_there(self._objects))
                who = other.holder if other else "a process that has removed its lock"
                self._lost = (
                    f"{who} has taken the run over, since this process did not renew its lease in time"
                )
                raise LeaseLostError(f"{self._objects.path('')} is not written to: {self._lost}")
            (self._terms, self._etag), self._until = renewed, began + terms.lease_s


def _put(objects: Objects, terms: Terms, replaces: str | None) -> tuple[Terms, str] | None:
    """Write the lock; returns what it says then, and its etag, or None when it is not what it should replace.

    An answer that was lost is no loss: a lock that has our token is replaced once more, so that its age is known.
    """
    for _ in range(ATTEMPTS + 1):
        try:
            return terms, objects.put(LOCK, _content(terms), replaces=replaces)
        except (ObjectChangedError, MissingObjectError):
            there = _there(objects)
            found = _terms_of(there)
            if there is None or found is None or found.token != terms.token:
                return None
            replaces, terms = there.etag, terms.model_copy(update={"renewals": found.renewals + 1})
    return None


def _there(objects: Objects) -> Object | None:
    try:
        return objects.get(LOCK)
    except MissingObjectError:
        return None


def _terms_of(there: Object | None) -> Terms | None:
    """What a lock says; None when there is none, or it is damaged."""
    try:
        return Terms.model_validate_json(there.content) if there else None
    except ValidationError:
        return None


def _content(terms: Terms) -> bytes:
    return terms.model_dump_json(indent=2).encode() + b"\n"
