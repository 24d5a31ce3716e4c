"""The run's writer: rows are gathered, committed as shards in a thread, and acknowledged.

A commit stores everything gathered while the one before it ran, one shard for each partition; `flush_s` makes
it wait for more. Rows are acknowledged when their shard has been renamed into place: from then on no death of
this process loses them. A kill between rename and acknowledgement leaves rows that nobody was told of; a
resumed run finds them in the folder, as it finds all others.

Compactions run in a thread of their own, one at a time, so that no commit waits for one.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

import pyarrow as pa

from tasks.errors import StoreError
from tasks.observe.spans import Lane, OpenSpan, current_lane, span
from tasks.store.commit import Committed, commit, publish_noted
from tasks.store.compaction import compact
from tasks.store.filesystem import Files
from tasks.store.inventory import DATASET, Inventory, Note
from tasks.store.layout import PartitionValue, partition_folder
from tasks.store.names import ShardName
from tasks.store.shard import check_rows, write_shard


@dataclass(frozen=True, slots=True)
class Appended:
    """Rows that wait for a commit, and whom to tell."""

    rows: pa.RecordBatch
    acknowledgement: asyncio.Future[None]


Gathered: TypeAlias = dict[str, list[Appended]]


class RunWriter:
    """Appends rows to the data sets of one run; used from one event loop, as an async context manager.

    Leaving the context stores everything that was appended, also when an error or a cancellation ends it.
    """

    def __init__(self, files: Files, epoch: int, flush_s: float, inventory: Inventory | None = None) -> None:
        self._files, self._epoch, self._flush_s, self._inventory = files, epoch, flush_s, inventory
        self._gathered: Gathered = {}
        self._lane: Lane | None = None
        self._unsettled: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_committing = False
        self._n_shards = 0
        self._thread: ThreadPoolExecutor | None = None
        self._beside: ThreadPoolExecutor | None = None

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="store-compaction")
        if self._inventory is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._inventory.find)
                await self.note()
            except BaseException:
                self._close()
                raise
        return self

    def append(self, dataset: str, rows: pa.RecordBatch, **partition: PartitionValue) -> asyncio.Future[None]:
        """Hand over rows of one partition; the future is done when they are stored.

        It need not be awaited, and cancelling it, or who awaits it, does not take the rows back. Its error, when
        the rows cannot be stored, is a StoreError.

        Raises:
            SchemaError: the rows do not have the data set's schema, or belong to another partition.
            StoreError: the writer is not open.
        """
        if self._thread is None:
            raise StoreError(
                f"the run's writer is not open; {rows.num_rows} rows of {dataset} were not taken"
            )
        folder = partition_folder(dataset, partition)
        check_rows(dataset, rows, partition)
        acknowledgement: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsettled.add(acknowledgement)
        if not self._gathered and (lane := current_lane()) is not None:
            self._lane = lane.beside("writer")
        self._gathered.setdefault(folder, []).append(Appended(rows, acknowledgement))
        self._set_timer()
        return asyncio.shield(acknowledgement)

    @property
    def n_waiting(self) -> int:
        """Calls of `append` whose rows are not stored yet."""
        return len(self._unsettled)

    async def flush(self) -> None:
        """Commit at once what was appended so far; returns when all of it is stored.

        Raises:
            StoreError: some of it could not be stored; the first such error.
        """
        appended = set(self._unsettled)
        waiting = appended
        while waiting:
            self._commit()
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for acknowledgement in appended:
            acknowledgement.result()

    async def note(self) -> None:
        """Store in the inventory what was written and removed since the last time, as one small shard.

        Raises:
            StoreError: it could not be stored, and is noted the next time.
        """
        if self._inventory is None or not (notes := self._inventory.take()):
            return
        try:
            await self.append(DATASET, self._inventory.rows(notes), epoch=self._epoch)
        except StoreError:
            self._inventory.add(notes)
            raise

    def removed(self, keys: Iterable[str]) -> None:
        """Say that shards were, or are about to be, removed; stored with the next `note`.

        A shard that is gone and noted as written is a finding of `verify`, unless a compacted one takes its place. So
        where none does, say it and `note` it before it is removed.
        """
        self._note(Note(key, "removed") for key in keys)

    def _note(self, notes: Iterable[Note]) -> None:
        if self._inventory is not None:
            self._inventory.add(notes)

    async def compact(self, folder: str, large_bytes: int) -> str:
        """Put the shards that a partition has by now into one, beside the commits; see tasks.store.compaction.

        Args:
            folder: of the partition, below the run's: "rollouts/step=000012".
            large_bytes: a partition whose shards have this size on average, or more, is left as it is.

        Returns:
            The compacted shard's key; empty when there is nothing to do.

        Raises:
            ShardError: a shard of the partition cannot be read, or its rows are not right; nothing changed.
            StoreError: the compacted shard could not be stored, or the writer is not open.
        """
        return await self._in_place(folder, partial(compact, self._files, folder, large_bytes=large_bytes))

    async def replace(self, dataset: str, rows: pa.RecordBatch, **partition: PartitionValue) -> None:
        """Put rows in the place of all that a partition has by now; for what is derived and shall be derived anew.

        Raises:
            SchemaError: the rows do not have the data set's schema, or belong to another partition.
            StoreError: they could not be stored, or the writer is not open; nothing changed.
        """
        folder = partition_folder(dataset, partition)
        check_rows(dataset, rows, partition)

        def store(name: ShardName) -> Note:
            write = partial(write_shard, name=name, dataset=dataset, appended=[rows])
            return publish_noted(self._files, folder, write, rows.num_rows)

        await self._in_place(folder, store)

    async def _in_place(self, folder: str, store: Callable[[ShardName], Note | None]) -> str:
        """Store a shard, beside the commits, that takes the place of those that a partition has by now."""
        if self._thread is None or self._beside is None:
            raise StoreError(f"the run's writer is not open; {folder} was not changed")
        name = ShardName(self._epoch, self._n_shards, is_compacted=True)
        self._n_shards += 1
        loop = asyncio.get_running_loop()
        # Commits run one after another: those of a smaller number are done when this is.
        await loop.run_in_executor(self._thread, _nothing)
        return await loop.run_in_executor(self._beside, self._noted, partial(store, name))

    async def remove(self, keys: Sequence[str]) -> None:
        """Remove superseded shards.

        Raises:
            StoreError: one could not be removed, or the writer is not open.
        """
        if self._beside is None:
            raise StoreError(f"the run's writer is not open; {len(keys)} superseded shards were not removed")
        await asyncio.get_running_loop().run_in_executor(self._beside, partial(self._remove, keys))

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.flush()
            await self.note()
        except StoreError:
            if error is None:
                raise
        finally:
            self._close()

    def _set_timer(self) -> None:
        if self._gathered and self._timer is None and not self._is_committing:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self._commit)

    def _take(self) -> tuple[Gathered, int]:
        """What was gathered, and the number of its first shard."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered = self._gathered, {}
        first, self._n_shards = self._n_shards, self._n_shards + len(gathered)
        return gathered, first

    def _commit(self) -> None:
        """Begin a commit of what was gathered, unless one is running, whose end begins the next."""
        if self._is_committing or not self._gathered or self._thread is None:
            return
        gathered, first = self._take()
        self._is_committing = True
        work = partial(commit, self._files, self._epoch, first, _rows_of(gathered))
        storing = span("storing").begin(self._lane)
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        running.add_done_callback(partial(self._committed, gathered, storing))

    def _committed(self, gathered: Gathered, storing: OpenSpan, running: asyncio.Future[Committed]) -> None:
        self._is_committing = False
        storing.end()
        self._settle(gathered, running.result())
        self._set_timer()

    def _settle(self, gathered: Gathered, committed: Committed) -> None:
        failures = committed.failed
        self._note(committed.written)
        for folder, appended in gathered.items():
            for each in appended:
                self._unsettled.discard(each.acknowledgement)
                if folder in failures:
                    each.acknowledgement.set_exception(failures[folder])
                else:
                    each.acknowledgement.set_result(None)

    def _close(self) -> None:
        """Store what a cancelled exit left, without an await that could be cancelled again."""
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.shutdown(wait=True, cancel_futures=True)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        gathered, first = self._take()
        self._settle(gathered, commit(self._files, self._epoch, first, _rows_of(gathered)))
        if self._inventory is not None and (notes := self._inventory.take()):
            folder = partition_folder(DATASET, {"epoch": self._epoch})
            commit(self._files, self._epoch, self._n_shards, {folder: [self._inventory.rows(notes)]})

    def _noted(self, store: Callable[[], Note | None]) -> str:
        """Store a shard and note it; returns its key, empty when there was nothing to do."""
        note = store()
        self._note([note] if note else [])
        return note.shard if note else ""

    def _remove(self, keys: Sequence[str]) -> None:
        self._files.remove(keys)
        self.removed(keys)


def _nothing() -> None:
    """Takes a place in a thread's queue."""


def _rows_of(gathered: Gathered) -> dict[str, list[pa.RecordBatch]]:
    return {folder: [each.rows for each in appended] for folder, appended in gathered.items()}
