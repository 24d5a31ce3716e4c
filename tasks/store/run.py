"""A run's folder, open for writing."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from tasks.errors import RunFinishedError, StoreError
from tasks.store.config import StoreConfig
from tasks.store.filesystem import Files, files_of
from tasks.store.fixed import check_fixed
from tasks.store.inventory import Inventory
from tasks.store.kind import check_kind
from tasks.store.layout import PARTITION_KEYS, RunFolder
from tasks.store.lock import RunLock, lock_run
from tasks.store.manifest import Manifest, Source, has_manifest, read_manifest, write_manifest
from tasks.store.migration import migrate
from tasks.store.schemas import SCHEMA_VERSION
from tasks.store.spans import RunSpans
from tasks.store.writer import RunWriter

RUN_ID_BYTES = 8


class OpenRun:
    """A locked run; a context manager.

    Attributes:
        manifest: what run.json says, always.
        files: to change the run's files by; they refuse once the run is another process's.
        writer: opened by its user.
        spans: on their way into the run.
    """

    def __init__(
        self, folder: RunFolder, lock: RunLock, files: Files, manifest: Manifest, flush_s: float
    ) -> None:
        self.folder, self.files, self.manifest = folder, files, manifest
        inventory = Inventory(folder, manifest.run, manifest.epoch)
        self.writer = RunWriter(self.files, manifest.epoch, flush_s, inventory)
        self.spans = RunSpans(manifest.run, self.writer)
        self._lock = lock

    def waiting(self) -> dict[str, int]:
        """How much is on its way into the data sets, by name."""
        return {"spans": self.spans.recorder.n_waiting, "batches of rows": self.writer.n_waiting}

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        *,
        config: dict[str, Any],
        fixed: Mapping[str, Any],
        versions: dict[str, str],
        git_commit: str,
        config_of: StoreConfig,
        trains: bool = True,
    ) -> Self:
        """Begin a run, or go on with one: its id stays, its epoch rises, its configuration becomes `config`.

        Args:
            folder: made when it is not there.
            config: resolved configuration, JSON values; `steps` says how many steps the run has.
            fixed: defaults, by dotted name, of the settings that may not change.
            versions: of the packages in use.
            git_commit: of the checkout; empty outside of one.
            config_of: settings of the data sets.
            trains: False for a run that is collected and no more.

        Raises:
            ConfigError: the folder cannot be written.
            RunLockedError: another process writes to it.
            RunMismatchError: fixed settings differ, or one of the run and the flow trains and the other does not.
            RunFinishedError: all its steps are done.
            LeaseLostError: another process has taken the run over meanwhile.
            StoreError: run.json cannot be read or written, or shards of an older schema version be brought up to today's.
        """
        lock = lock_run(folder, config_of)
        files = files_of(folder, lock.check)
        try:
            now = {"config": config, "versions": versions, "git_commit": git_commit}
            stored = read_manifest(folder) if has_manifest(folder) else None
            if stored:
                check_kind(folder, stored, trains=trains)
                manifest = _brought_up(folder, files, _resumed(folder, stored, fixed, now), config_of)
            else:
                manifest = _begun(folder, now | {"trains": trains})
            write_manifest(files, manifest, stored)
        except Exception:
            lock.release()
            raise
        return cls(folder, lock, files, manifest, config_of.flush_s)

    @classmethod
    def extend(cls, folder: RunFolder, *, config_of: StoreConfig) -> Self:
        """Open a run, finished or not, to add to its data sets; what it is stays, its epoch rises.

        Raises:
            ConfigError: the folder cannot be written.
            RunLockedError: another process writes to it.
            LeaseLostError: another process has taken the run over meanwhile.
            StoreError: it holds no run, or run.json cannot be read or written.
        """
        read_manifest(folder)
        lock = lock_run(folder, config_of)
        files = files_of(folder, lock.check)
        try:
            stored = read_manifest(folder)
            manifest = _brought_up(folder, files, replace(stored, epoch=stored.epoch + 1), config_of)
            write_manifest(files, manifest, stored)
        except Exception:
            lock.release()
            raise
        return cls(folder, lock, files, manifest, config_of.flush_s)

    def next_incarnation(self) -> int:
        """Count one more trainer that loads state; returns its number, from 1, which is stored by then."""
        self._replace(replace(self.manifest, incarnation=self.manifest.incarnation + 1))
        return self.manifest.incarnation

    def keep_sources(self, sources: tuple[Source, ...]) -> None:
        """Note the runs that this one trains from, unless they are noted."""
        if not self.manifest.sources:
            self._replace(replace(self.manifest, sources=sources))

    def finish(self) -> None:
        """Note that every step is done."""
        self._replace(replace(self.manifest, status="finished"))

    def close(self) -> None:
        """Let go of the folder; may be called twice."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replace(self, manifest: Manifest) -> None:
        write_manifest(self.files, manifest, self.manifest)
        self.manifest = manifest


def _begun(folder: RunFolder, now: dict[str, Any]) -> Manifest:
    files = files_of(folder)
    if orphans := [name for name in PARTITION_KEYS if files.keys(f"{name}/**/*")]:
        raise StoreError(
            f"{folder.location} has data sets ({', '.join(orphans)}) but no run.json: it is no run's folder"
        )
    return Manifest(
        run=secrets.token_hex(RUN_ID_BYTES),
        incarnation=0,
        epoch=1,
        schema_version=SCHEMA_VERSION,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        status="running",
        **now,
    )


def _resumed(folder: RunFolder, stored: Manifest, fixed: Mapping[str, Any], now: dict[str, Any]) -> Manifest:
    if stored.status == "forking":
        raise StoreError(f"{folder.location} was not forked to the end; give the same `rollmill fork` again")
    check_fixed(folder.location, stored.config, now["config"], fixed)
    steps = stored.config.get("steps", 0)
    if stored.status == "finished" and now["config"].get("steps", 0) <= steps:
        raise RunFinishedError(
            f"{folder.location} has done all its {steps} steps; raise steps to go on with it"
        )
    return replace(stored, epoch=stored.epoch + 1, status="running", **now)


def _brought_up(folder: RunFolder, files: Files, manifest: Manifest, config: StoreConfig) -> Manifest:
    """A run's manifest, once all its shards are of today's schema version."""
    if manifest.schema_version < SCHEMA_VERSION:
        migrate(folder, files, config.compaction_grace_s)
    return replace(manifest, schema_version=SCHEMA_VERSION)
