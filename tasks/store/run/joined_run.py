"""A run that another process has locked, to which this process writes as well: one writer of several, under the same epoch."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from rollmill.tasks.errors import RunLockedError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.lock import RunLock, lock_writer
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.writable_run import LOCAL_FLUSH_S
from rollmill.tasks.store.shards.inventory import ForwardedInventory, ShardEvent
from rollmill.tasks.store.shards.writer import RunWriter


class JoinedRun:
    """A run on a disk that another process holds open, with a writer of this one; an async context manager.

    Its shards have the epoch of the process that holds the run's lock. A process that opens the run later waits for the end of this one,
    so no row is stored that it does not see (`await_writers`).

    Args:
        folder: of the run.
        run: id of the run.
        epoch: of the process that holds its lock.
        name: of this process among those that write to the run; a file of RUN/writers has it.

    Attributes:
        writer: appends rows to the run's data sets.
    """

    def __init__(self, folder: RunFolder, run: str, epoch: int, name: str) -> None:
        self.folder, self.run, self.epoch, self.name = folder, run, epoch, name
        self._inventory = ForwardedInventory(folder, run, epoch)
        lane = f"writer {name}"
        self.writer = RunWriter(open_files(folder), epoch, LOCAL_FLUSH_S, self._inventory, lane)
        self._lock: RunLock | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Lock the process's file, and check that the run is still that of the epoch.

        Raises:
            RunLockedError: another process has opened the run meanwhile, or one of this name still lives.
            ManifestError: the folder has no run: it is not on a disk that this machine shares.
        """
        self._lock = await asyncio.to_thread(lock_writer, self.folder, self.name)
        try:
            # After the lock: whoever raises the epoch later finds the lock, and waits.
            manifest = await asyncio.to_thread(read_manifest, self.folder)
            if (manifest.run, manifest.epoch) != (self.run, self.epoch):
                raise RunLockedError(
                    f"{self.folder.location} is at epoch {manifest.epoch} of run {manifest.run}, not at {self.epoch} of {self.run}: "
                    "another process has resumed it"
                )
            await self._stack.enter_async_context(self.writer)
        except BaseException:
            self._lock.release()
            raise
        return self

    async def __aexit__(self, *details: Any) -> None:
        try:
            await self._stack.__aexit__(*details)
        finally:
            if self._lock is not None:
                self._lock.release()

    def take_events(self) -> Sequence[ShardEvent]:
        """Remove and return the shards written since the last call, for the process that holds the run's lock to record."""
        return self._inventory.forward()
