"""A run that is open for writing: its lock, manifest, writer and spans."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Self

from rollmill.tasks.errors import RunFinishedError, RunMismatchError, StoreError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import Files, open_files
from rollmill.tasks.store.folders import PARTITION_KEYS, RunFolder
from rollmill.tasks.store.run.immutable_settings import check_immutable, list_changes
from rollmill.tasks.store.run.lock import RunLock, await_writers, lock_run
from rollmill.tasks.store.run.manifest import (
    Manifest,
    TrainingSource,
    has_manifest,
    read_manifest,
    write_manifest,
)
from rollmill.tasks.store.run.resume import find_resume_point
from rollmill.tasks.store.schemas import SCHEMA_VERSION
from rollmill.tasks.store.shards.inventory import Inventory
from rollmill.tasks.store.shards.writer import RunWriter
from rollmill.tasks.store.span_rows import RunSpans

RUN_ID_BYTES = 8

# How long a commit waits for more rows, while any are expected. On a disk a file costs little. On S3 each commit is a request: waiting
# makes a handful of a step's dozens.
LOCAL_FLUSH_S, S3_FLUSH_S = 0.02, 2.0


class OpenRun:
    """A run that this process has locked for writing; a context manager that releases the lock.

    Attributes:
        manifest: the present content of run.json.
        files: the run's files, for writing; they refuse once another process has taken the run over.
        writer: appends rows to the run's data sets; the caller enters its context.
        spans: records spans (timed intervals of work) and stores them in the run.
        changes: of a run that is resumed, the settings that differ from those before, as text; None if it is begun.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: RunLock,
        files: Files,
        manifest: Manifest,
        changes: Sequence[str] | None = None,
    ) -> None:
        self.folder, self.files, self.manifest, self.changes = folder, files, manifest, changes
        inventory = Inventory(folder, manifest.run, manifest.epoch)
        flush_s = LOCAL_FLUSH_S if folder.is_local else S3_FLUSH_S
        self.writer = RunWriter(self.files, manifest.epoch, flush_s, inventory)
        self.spans = RunSpans(manifest.run, self.writer)
        self._lock = lock

    def waiting(self) -> dict[str, int]:
        """Return how many spans, and batches of rows, are not stored yet, by the names "spans" and "batches of rows"."""
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
        by_step: Mapping[str, Any] = {},
    ) -> Self:
        """Begin a run, or resume one: its id stays, its epoch rises by one, its configuration becomes `config`.

        Args:
            folder: of the run; created if missing.
            config: resolved configuration, JSON values; `steps` says how many steps the run has.
            fixed: defaults, by dotted name, of the settings that cannot change.
            versions: of the packages in use.
            git_commit: of the checkout; empty outside of one.
            config_of: settings of the data sets.
            trains: False for a run that only collects.
            by_step: defaults, by dotted name, of the settings that are recorded for the steps that were trained under them.

        Raises:
            ConfigError, RunLockedError: it cannot be locked; see `lock_run`.
            RunMismatchError: fixed settings differ, or one of the run and the flow trains and the other does not.
            RunFinishedError: all its steps are done.
            LeaseLostError: another process has taken the run over meanwhile.
            StoreError: run.json cannot be read or written.
        """
        lock = lock_run(folder, config_of)
        files = open_files(folder, lock.check)
        try:
            now = {"config": config, "versions": versions, "git_commit": git_commit}
            stored = read_manifest(folder) if has_manifest(folder) else None
            if stored:
                check_run_kind(folder, stored, trains=trains)
                manifest = _resume_manifest(folder, stored, fixed, now, by_step)
            else:
                manifest = _begin_manifest(folder, now | {"trains": trains})
            write_manifest(files, manifest, stored)
            # Only now: one that starts later finds another epoch in run.json, and ends.
            await_writers(folder)
        except Exception:
            lock.release()
            raise
        return cls(folder, lock, files, manifest, list_changes(stored.config, config) if stored else None)

    @classmethod
    def extend(cls, folder: RunFolder, *, config_of: StoreConfig) -> Self:
        """Open a run, finished or not, to add rows to its data sets; only its epoch changes.

        Raises:
            ConfigError, RunLockedError: it cannot be locked; see `lock_run`.
            LeaseLostError: another process has taken the run over meanwhile.
            StoreError: it holds no run, or run.json cannot be read or written.
        """
        # Read before it is locked, since locking makes the folder, and again after, since its last writer may have changed it.
        read_manifest(folder)
        lock = lock_run(folder, config_of)
        files = open_files(folder, lock.check)
        try:
            stored = read_manifest(folder)
            manifest = replace(stored, epoch=stored.epoch + 1)
            write_manifest(files, manifest, stored)
            await_writers(folder)
        except Exception:
            lock.release()
            raise
        return cls(folder, lock, files, manifest)

    def next_incarnation(self) -> int:
        """Raise the counter `incarnation` in run.json, since a trainer loads state; returns the new number, from 1."""
        self._replace(replace(self.manifest, incarnation=self.manifest.incarnation + 1))
        return self.manifest.incarnation

    def keep_sources(self, sources: tuple[TrainingSource, ...]) -> None:
        """Record in run.json the runs whose rollouts this run trains on, beside those that are recorded already."""
        added = tuple(each for each in sources if each not in self.manifest.sources)
        if added:
            self._replace(replace(self.manifest, sources=(*self.manifest.sources, *added)))

    def keep_scorer(self, key: str, description: str, *, is_own: bool = False) -> None:
        """Record in run.json what the version of a scorer, NAME@VERSION, is a digest of (empty: of nothing), and if it is the run's own."""
        described = {key: description} if description else {}
        kept = replace(
            self.manifest,
            scorers={**self.manifest.scorers, **described},
            scorer=key if is_own else self.manifest.scorer,
        )
        if kept != self.manifest:
            self._replace(kept)

    def finish(self) -> None:
        """Set the run's status in run.json to finished, since all its steps are done."""
        self._replace(replace(self.manifest, status="finished"))

    def close(self) -> None:
        """Release the run's lock; may be called twice."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replace(self, manifest: Manifest) -> None:
        write_manifest(self.files, manifest, self.manifest)
        self.manifest = manifest


def _begin_manifest(folder: RunFolder, now: dict[str, Any]) -> Manifest:
    files = open_files(folder)
    # Rows without a run.json may be those of a run that lost it: a new one would take them for its own.
    if orphans := [name for name in PARTITION_KEYS if files.keys(f"{name}/**/*")]:
        raise StoreError(
            f"{folder.location} has data sets ({', '.join(orphans)}) but no run.json: it is not the folder of a run"
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


def _resume_manifest(
    folder: RunFolder,
    stored: Manifest,
    fixed: Mapping[str, Any],
    now: dict[str, Any],
    by_step: Mapping[str, Any],
) -> Manifest:
    if stored.status == "forking":
        raise StoreError(f"{folder.location} is an unfinished fork; run the same `rollmill fork` again")
    check_immutable(folder.location, stored.config, now["config"], fixed)
    steps = stored.config.get("steps", 0)
    if stored.status == "finished" and now["config"].get("steps", 0) <= steps:
        raise RunFinishedError(f"{folder.location} has done all its {steps} steps; raise steps to resume it")
    # A stored batch is applied again under the settings of its step; the new ones hold from the first step without a batch.
    n_stored = find_resume_point(folder).stored_batches
    earlier = stored.keep_earlier_settings(n_stored, now["config"], by_step)
    return replace(
        stored,
        epoch=stored.epoch + 1,
        # A run of an older version gets shards of this one.
        schema_version=SCHEMA_VERSION,
        status="running",
        earlier_settings=earlier,
        **now,
    )


def check_run_kind(folder: RunFolder, manifest: Manifest, *, trains: bool) -> None:
    """Refuse to train in the folder of a run that only collects, or to collect in one that trains; raises RunMismatchError."""
    if manifest.trains and not trains:
        raise RunMismatchError(
            f"{folder.location} is a run that trains, and the flow collect does not: resume it by `rollmill run`, or "
            "give another name to begin a new run"
        )
    if trains and not manifest.trains:
        raise RunMismatchError(
            f"{folder.location} was begun by the flow collect, and has no batches: resume it by `rollmill collect`, train "
            "a new run from it by `rollmill retrain`, or give another name to begin a new run"
        )
