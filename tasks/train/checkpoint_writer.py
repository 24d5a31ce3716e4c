"""Writes checkpoints beside training: a thread on each rank, and a marker by rank 0 when every rank's file is there.

The ranks' threads tell rank 0's by keys of the store, never by a collective: the ranks may be at one.
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
from torch.distributed.distributed_c10d import Store

from tasks.errors import LeaseLostError, RollmillError, StoreError
from tasks.store.checkpoint_files import StoredFile
from tasks.train.protocol import CheckpointWritten

_ERRORS = {each.__name__: each for each in (LeaseLostError, StoreError)}
"""What a rank's failure may be on rank 0; anything else is a StoreError there."""


@dataclass(frozen=True, slots=True)
class Writing:
    """One checkpoint to be written.

    Attributes:
        version: policy version.
        write_own: writes this rank's file; returns what the marker says of it, by its name.
        finish: writes the marker, given all ranks' files; called on rank 0 alone.
        give_up: removes what is left after a failure; called on rank 0 alone.
    """

    version: int
    write_own: Callable[[], dict[str, StoredFile]]
    finish: Callable[[dict[str, StoredFile]], None]
    give_up: Callable[[], None]


class CheckpointWriter:
    """A rank's writer, of one checkpoint at a time.

    Args:
        store: shared by all ranks; a connection of its own, since it is waited on beside training.
        rank: of this process.
        world_size: W.
        wait_s: seconds of one wait for a key.
    """

    def __init__(self, store: Store, rank: int, world_size: int, wait_s: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._wait = timedelta(seconds=wait_s)
        self._number = 0
        self._version = -1
        self._outcome: Future[CheckpointWritten] | None = None
        self._is_told = True

    def begin(self, writing: Writing) -> None:
        """Start writing, when what was begun before has ended; every rank calls it, as often as the others."""
        self.join()
        self._number, self._version = self._number + 1, writing.version
        outcome: Future[CheckpointWritten] = Future()
        key = f"checkpoint/{self._number}"

        def run() -> None:
            try:
                outcome.set_result(self._write(key, writing))
            except Exception as error:  # noqa: BLE001 - whatever it is, `written` tells it
                outcome.set_exception(error)

        self._outcome, self._is_told = outcome, False
        threading.Thread(target=run, name=key, daemon=True).start()

    def join(self) -> None:
        """Wait until nothing is being written, whatever came of it."""
        if self._outcome is not None:
            self._outcome.exception()

    def check(self) -> None:
        """Wait until nothing is being written; raises the last one's error, as `written`, if nobody has heard of it."""
        if not self._is_told:
            self.written(self._version)

    def written(self, version: int) -> CheckpointWritten:
        """Wait for the end of the checkpoint that was begun last, which is of `version`; on rank 0 alone.

        Raises:
            LeaseLostError: the run is on S3, and a newer trainer has loaded it.
            StoreError: it could not be written, which is as if it had not been begun; or none of it was begun.
        """
        if self._outcome is None or self._version != version:
            raise StoreError(f"this trainer has not begun a checkpoint of version {version}")
        error = self._outcome.exception()
        self._is_told = True
        if error is None or isinstance(error, RollmillError):
            return self._outcome.result()
        raise StoreError(f"checkpoint of version {version}: {type(error).__name__}: {error}") from error

    def _write(self, key: str, writing: Writing) -> CheckpointWritten:
        """Write this rank's file and tell rank 0 how that went; on rank 0, write the marker when all have."""
        started = time.perf_counter()
        try:
            report: dict[str, Any] = {
                "files": {name: file.model_dump() for name, file in writing.write_own().items()}
            }
        except (RollmillError, OSError) as error:
            report = {"error": str(error), "type": type(error).__name__}
        self._store.set(f"{key}/{self._rank}", json.dumps(report))
        n_bytes = 0
        if self._rank == 0:
            try:
                files = self._files(key)
                writing.finish(files)
            except (RollmillError, OSError):
                writing.give_up()
                raise
            n_bytes = sum(file.bytes for file in files.values())
        return CheckpointWritten(writing.version, time.perf_counter() - started, n_bytes)

    def _files(self, key: str) -> dict[str, StoredFile]:
        """What the ranks have written, once all are done; raises the error of the first that failed."""
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
                continue  # that rank still writes; were it dead, the service would end
            report: dict[str, Any] = json.loads(self._store.get(key))
            self._store.delete_key(key)
            return report
