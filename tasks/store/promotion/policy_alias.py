"""A name for a policy that can be moved to another one, such as policies/production, and the history of its moves.

    policies/production                              -> .history/production/000002-1a2b3c4d/policy
    policies/.history/production/000002-1a2b3c4d/    record.json, policy -> the policy's folder

A move stores its record first, and then replaces the alias: one rename on a disk, one conditional write of a small object on S3,
which has the record's key. So a kill leaves the alias at one policy or the other. A record that no alias leads to does not count.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rollmill.tasks.errors import ConfigError, LeaseLostError, StoreError
from rollmill.tasks.store.filesystem import (
    describe_os_error,
    open_files,
    publish_path,
    publish_text,
    read_text,
    stage_path,
)
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.promotion.gate_record import GateRecord
from rollmill.tasks.store.run.lock import LOCK_TIMEOUT_S, FolderLock

RECORD = "record.json"
_POLICY = "policy"


class AliasRecord(BaseModel):
    """One move of an alias.

    Attributes:
        action: promote, or rollback to the policy of an earlier record.
        policy: absolute folder of the policy, or its location on S3.
        digest, run, version: of the policy; see `Lineage`.
        approved_by, note: who moved it, and why, as they said.
        gate: the decision that the policy may replace the one before; None for a rollback.
        previous: key of the record before; empty for the first one.
        restores: key of the record that a rollback goes back to; else empty.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = 1
    action: Literal["promote", "rollback"]
    policy: str
    digest: str
    run: str
    version: int
    created_at: str
    approved_by: str = ""
    note: str = ""
    gate: GateRecord | None = None
    previous: str = ""
    restores: str = ""


class PolicyAlias:
    """An alias by its location: a path such as policies/production, or s3://bucket/policies/production.

    Attributes:
        root: the folder that the alias is in.
        name: of the alias.
    """

    def __init__(self, location: str) -> None:
        place = RunFolder(location)
        parent, _, self.name = place.absolute.rpartition("/")
        self.location, self.root = place.location, RunFolder(parent)
        self._files = open_files(self.root)
        self._history = f".history/{self.name}"

    def current_key(self) -> str:
        """Return the key of the record that the alias leads to; empty if there is no alias.

        Raises:
            ConfigError: something else has its name.
        """
        if not self.root.is_local:
            keys = self._files.keys(self.name)
            found = read_text(self._files, self.name).decode().strip() if keys else ""
        else:
            path = self.root.local / self.name
            if not os.path.lexists(path):
                return ""
            found = str(path.readlink()).removesuffix(f"/{_POLICY}") if path.is_symlink() else "?"
        if found and not found.startswith(f"{self._history}/"):
            raise ConfigError(
                "alias", self.location, "it is no alias of Rollmill; remove it, or choose another name"
            )
        return found.removeprefix(f"{self._history}/")

    def read(self, key: str) -> AliasRecord:
        """Read a record by its key; raises StoreError if it is missing or damaged."""
        at = f"{self._history}/{key}/{RECORD}"
        text = read_text(self._files, at)
        # The key ends with a hash of the record.
        if _hash(text) != key.rpartition("-")[2]:
            raise StoreError(f"{self.root.path(at)} is damaged: its content is not what was written")
        try:
            return AliasRecord.model_validate_json(text)
        except ValidationError as error:
            raise StoreError(f"{self.root.path(at)} is damaged: {error.errors()[0]['msg']}") from error

    def current(self) -> AliasRecord | None:
        """Return the record that the alias leads to; None if there is no alias."""
        key = self.current_key()
        return self.read(key) if key else None

    def history(self) -> Iterator[tuple[str, AliasRecord]]:
        """Yield the key and the record of each move, newest first."""
        key = self.current_key()
        while key:
            record = self.read(key)
            yield key, record
            key = record.previous

    def check_kind(self, policy: RunFolder) -> None:
        """Refuse a policy on S3 for an alias on a disk, and the reverse; raises ConfigError."""
        if self.root.is_local != policy.is_local:
            remedy = "an alias and its policy are both on a disk, or both on S3; copy the policy"
            raise ConfigError("alias", self.location, remedy)

    def move(self, make: Callable[[str], AliasRecord]) -> AliasRecord:
        """Move the alias: `make` gets the key of the current record, and returns the new one or raises.

        Raises:
            RunLockedError: another process moves it at the same time.
            StoreError: it could not be stored, or another process moved it at the same time; it is not moved.
        """
        with self._lock():
            before = self.current_key()
            record = make(before)
            self.check_kind(RunFolder(record.policy))
            key = self._store(record, before)
            self._replace(key, before)
        return record

    def earlier(self) -> tuple[str, AliasRecord]:
        """Return key and record of the policy that a rollback goes back to; ConfigError if there is none."""
        record = self.current()
        if record is None:
            raise ConfigError("alias", self.location, "there is no such alias; `rollmill promote` makes it")
        _, promoted = self._promotion(record, self.current_key())
        if not promoted.previous:
            raise ConfigError("alias", self.location, "no earlier policy is in its history")
        return self._promotion(self.read(promoted.previous), promoted.previous)

    def _promotion(self, record: AliasRecord, key: str) -> tuple[str, AliasRecord]:
        """Return the record of the promotion that a record leads to."""
        return (record.restores, self.read(record.restores)) if record.restores else (key, record)

    def _store(self, record: AliasRecord, before: str) -> str:
        text = record.model_dump_json(indent=1).encode() + b"\n"
        key = f"{1 + int(before.partition('-')[0] or 0):06d}-{_hash(text)}"
        folder = f"{self._history}/{key}"
        if not self.root.is_local:
            publish_text(self._files, f"{folder}/{RECORD}", text)
            return key
        with publish_path(self.root.local / folder) as staged:
            staged.mkdir()
            (staged / RECORD).write_bytes(text)
            (staged / _POLICY).symlink_to(record.policy)
        return key

    def _replace(self, key: str, before: str) -> None:
        """Let the alias lead to the record `key`, if it still leads to `before`."""
        target = f"{self._history}/{key}"
        if not self.root.is_local:
            expected = f"{self._history}/{before}".encode() if before else None
            try:
                self._files.exchange(self.name, target.encode(), lambda found: found == expected)
            except LeaseLostError as error:
                raise StoreError(
                    f"another process moved {self.location} at the same time; it is not moved"
                ) from error
            return
        path = self.root.local / self.name
        try:
            with stage_path(self.root.local / self._history) as staged:
                staged.symlink_to(f"{target}/{_POLICY}")
                staged.replace(path)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {describe_os_error(error)}") from error

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Let no other process of this machine move the alias meanwhile; on S3 the conditional write decides."""
        if not self.root.is_local:
            yield
            return
        lock = FolderLock.acquire(
            RunFolder(self.root.path(self._history)), self.root.location, LOCK_TIMEOUT_S
        )
        try:
            yield
        finally:
            lock.release()


def now() -> str:
    """Return the present time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def resolve_policy(location: str) -> RunFolder:
    """Return the folder of a policy that is given by its folder or by an alias; raises StoreError for a damaged alias."""
    folder = RunFolder(location)
    if folder.is_local:
        # The alias itself may move while its policy is read.
        return RunFolder(Path(location).resolve())
    alias = PolicyAlias(location)
    if "/" in location.removeprefix("s3://") and (record := alias.current()) is not None:
        return RunFolder(record.policy)
    return folder


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]
