"""Writes checkpoints in the background: a thread on each rank writes its file, and rank 0 the marker when all files are there.

The threads report to rank 0 by keys of a store, never by a collective: the main threads may be in one.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rollmill.tasks.errors import LeaseLostError, RollmillError, StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import StoredFile
from rollmill.tasks.train.engine.private_torch import Store
from rollmill.tasks.train.service.answers import CheckpointWritten

_ERRORS = {each.__name__: each for each in (LeaseLostError, StoreError)}
"""What a rank's failure may be on rank 0; anything else is a StoreError there."""


@dataclass(frozen=True, slots=True)
class Writing:
    """Functions that write one checkpoint to disk, called in the background after its state was copied to memory.

    Attributes:
        version: policy version.
        write_own: writes this rank's file; returns {file name: entry of the file in the checkpoint's marker}.
        finish: writes the marker, the file that makes a checkpoint complete, given the entries of all ranks' files; called on
            rank 0 alone.
        give_up: removes the incomplete checkpoint's folder after a failure; called on rank 0 alone.
    """

    version: int
    write_own: Callable[[], dict[str, StoredFile]]
    finish: Callable[[dict[str, StoredFile]], None]
    give_up: Callable[[], None]


class CheckpointWriter:
    """Writes one checkpoint at a time on a rank.

    Args:
        store: key-value store shared by all ranks, over a separate connection, since a thread waits on it during training.
        rank: number of this rank.
        world_size: number of ranks.
        wait_s: seconds of one wait for a key of the store; an expired wait is repeated.
    """

    def __init__(self, store: Store, rank: int, world_size: int, wait_s: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._wait = timedelta(seconds=wait_s)
        self._number = 0
        self._version = -1
        self._outcome: Future[CheckpointWritten] | None = None
        self._was_reported = True

    def begin(self, writing: Writing) -> None:
        """Wait until the previous checkpoint has ended, then begin to write this one on a thread; every rank must call it."""
        self.join()
        self._number, self._version = self._number + 1, writing.version
        outcome: Future[CheckpointWritten] = Future()
        key = f"checkpoint/{self._number}"

        def run() -> None:
            try:
                outcome.set_result(self._write(key, writing))
            except Exception as error:  # noqa: BLE001 - whatever it is, `wait` raises it
                outcome.set_exception(error)

        self._outcome, self._was_reported = outcome, False
        # A daemon: a rank that fails must end, whatever its checkpoint waits for.
        threading.Thread(target=run, name=key, daemon=True).start()

    def join(self) -> None:
        """Wait until no checkpoint is being written, whether or not it succeeded."""
        if self._outcome is not None:
            self._outcome.exception()

    def check(self) -> None:
        """Wait until no checkpoint is being written; raises the last one's error unless `check` or `wait` raised it before."""
        if not self._was_reported:
            self.wait(self._version)

    def wait(self, version: int) -> CheckpointWritten:
        """Wait until the last begun checkpoint, which must be of `version`, is complete; call it on rank 0 alone.

        Raises:
            LeaseLostError: the run is on S3, and a newer trainer has loaded it.
            StoreError: it could not be written, and its folder was removed; or the last begun checkpoint is not of this version.
        """
        if self._outcome is None or self._version != version:
            raise StoreError(f"this trainer has not begun a checkpoint of version {version}")
        error = self._outcome.exception()
        self._was_reported = True
        if error is None or isinstance(error, RollmillError):
            return self._outcome.result()
        raise StoreError(f"checkpoint of version {version}: {type(error).__name__}: {error}") from error

    def _write(self, key: str, writing: Writing) -> CheckpointWritten:
        """Write this rank's file and report it to rank 0; on rank 0, write the marker when all files are there."""
        started = time.perf_counter()
        try:
            report: dict[str, Any] = {
                "files": {name: file.model_dump() for name, file in writing.write_own().items()}
            }
        except Exception as error:  # noqa: BLE001 - rank 0 waits for the report, and raises it
            kind = type(error).__name__
            text = str(error) if isinstance(error, RollmillError | OSError) else f"{kind}: {error}"
            report = {"error": text, "type": kind}
        # By the store and not by a collective: the main threads may be in one at this moment.
        self._store.set(f"{key}/{self._rank}", json.dumps(report))
        n_bytes = 0
        if self._rank == 0:
            try:
                files = self._files(key)
                writing.finish(files)
            except Exception:
                # Without its marker the folder would only take room.
                writing.give_up()
                raise
            n_bytes = sum(file.bytes for file in files.values())
        return CheckpointWritten(writing.version, time.perf_counter() - started, n_bytes)

    def _files(self, key: str) -> dict[str, StoredFile]:
        """Wait for the reports of all ranks, and return all files by name; raises the error of the first rank that failed."""
        reports = [self._report(f"{key}/{rank}") for rank in range(self._world_size)]
        for report in reports:
            if "error" in report:
                raise _ERRORS.get(report["type"], StoreError)(report["error"])
        return {name: StoredFile(**file) for report in reports for name, file in report["files"].items()}

    def _report(self, key: str) -> dict[str, Any]:
        while True:
            try:
                self._store.wait([key], self._wait)
            except dist.DistStoreError:
                # That rank still writes; were it dead, the service would end.
                continue
            report: dict[str, Any] = json.loads(self._store.get(key))
            self._store.delete_key(key)
            return report
