"""The run's writer: gathers rows, commits them as shards in a thread, and acknowledges them.

A commit stores everything gathered while the one before it ran, one shard for each partition; while more rows are
expected, it waits `flush_s` for them. Rows are acknowledged when their shard has been renamed into place: from then on no death of
this process loses them. A kill between rename and acknowledgement leaves stored rows without an acknowledgement;
a resumed run finds them in the folder, as it finds all others.

Compactions run in a dedicated thread, one at a time, so that no commit waits for one.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import pyarrow as pa

from rollmill.tasks.errors import StoreError
from rollmill.tasks.observe.spans import Lane, OpenSpan, current_lane, span
from rollmill.tasks.store.filesystem import Files
from rollmill.tasks.store.folders import PartitionValue, partition_folder
from rollmill.tasks.store.shards.inventory import INVENTORY, Inventory, ShardEvent
from rollmill.tasks.store.shards.shard import check_rows, publish_shard, write_shard
from rollmill.tasks.store.shards.shard_compaction import compact_partition
from rollmill.tasks.store.shards.shard_names import ShardName

# Data sets whose rows of a step are stored before those of another.
STORED_AFTER = {"rollouts": ("routing", "states"), "scores": ("rollouts",)}

_COMMIT_ORDER = {"routing": 0, "states": 0, "rollouts": 1, "scores": 2}


def commit_rows(
    files: Files,
    epoch: int,
    first_number: int,
    gathered: Mapping[str, Sequence[pa.RecordBatch]],
    lost: Mapping[str, StoreError] = {},
) -> tuple[dict[str, StoreError], list[ShardEvent]]:
    """Store the rows gathered for each folder as one shard; the shards are numbered from `first_number`.

    A folder that fails does not affect the others, with one exception (STORED_AFTER): a step's rollouts are stored after
    its routing and states, its scores after its rollouts, and they fail together, also with rows that an earlier commit has `lost`,
    given with the error of each folder. So there is no score without its rollout, and no rollout without its routed experts,
    whenever the process dies.

    Example: {"plans/step=000000": [...], "rollouts/step=000000": [...]} with epoch 2 and first number 7 becomes
    plans/step=000000/000002-000007-DIGEST.arrow and rollouts/step=000000/000002-000008-DIGEST.arrow.

    Returns:
        The error of each folder whose rows could not be stored, and the events of the shards that were.
    """
    failed: dict[str, StoreError] = {}
    written: list[ShardEvent] = []
    in_order = sorted(gathered.items(), key=lambda each: _COMMIT_ORDER.get(_dataset(each[0]), 1))
    for number, (folder, appended) in enumerate(in_order, first_number):
        step = folder.rpartition("/")[2]
        missing = {**lost, **failed}
        before = (each for each in missing if _dataset(each) in STORED_AFTER.get(_dataset(folder), ()))
        if reasons := [missing[each] for each in before if each.endswith(f"/{step}")]:
            failed[folder] = reasons[0]
            continue
        try:
            written.append(_store_rows(files, folder, appended, ShardName(epoch, number)))
        except StoreError as error:
            failed[folder] = error
        except Exception as error:  # noqa: BLE001 - it must reach only the callers that wait for these rows
            failed[folder] = StoreError(f"cannot write to {folder}: {type(error).__name__}: {error}")
    return failed, written


def _store_rows(files: Files, folder: str, appended: Sequence[pa.RecordBatch], name: ShardName) -> ShardEvent:
    def write(path: Path) -> tuple[str, int]:
        n_rows = sum(rows.num_rows for rows in appended)
        return write_shard(path, name, _dataset(folder), appended), n_rows

    return publish_shard(files, folder, write)


def _dataset(folder: str) -> str:
    """Return the name of the data set to which a partition's folder belongs."""
    return folder.partition("/")[0]


class PendingRows(NamedTuple):
    """Rows that were appended and are not stored yet, and the future to complete when they are."""

    rows: pa.RecordBatch
    acknowledgement: asyncio.Future[None]


PendingByFolder: TypeAlias = dict[str, list[PendingRows]]


class RunWriter:
    """Appends rows to the data sets of one run; used from one event loop, as an async context manager.

    Leaving the context stores everything that was appended, also when an error or a cancellation ends it. Its commits are spans of the
    lane `lane`.

    Attributes:
        flush_s: seconds that a commit waits for more rows, while `expect_rows` is in use.
    """

    def __init__(
        self,
        files: Files,
        epoch: int,
        flush_s: float,
        inventory: Inventory | None = None,
        lane: str = "writer",
    ) -> None:
        self._files, self._epoch, self.flush_s, self._inventory = files, epoch, flush_s, inventory
        self._lane_name = lane
        self._gathered: PendingByFolder = {}
        # Folders whose rows could not be stored: what belongs to these may not be stored either.
        self._lost: dict[str, StoreError] = {}
        self._lane: Lane | None = None
        self._unsettled: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_committing = self._is_urgent = False
        self._n_expecting = self._n_shards = 0
        self._thread: ThreadPoolExecutor | None = None
        self._compacting: ThreadPoolExecutor | None = None

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._compacting = ThreadPoolExecutor(1, thread_name_prefix="store-compaction")
        if self._inventory is not None:
            # What a killed writer stored is recorded before anything new is.
            try:
                await self.find_unrecorded()
                await self.note()
            except BaseException:
                self._close()
                raise
        return self

    def append(self, dataset: str, rows: pa.RecordBatch, **partition: PartitionValue) -> asyncio.Future[None]:
        """Append rows to one partition; the returned future is done when they are stored.

        It need not be awaited, and cancelling it or the task that awaits it does not take the rows back. If the rows
        cannot be stored, its exception is a StoreError.

        Raises:
            SchemaError: the rows do not have the data set's schema, or belong to another partition.
            StoreError: the writer is not open.
        """
        if self._thread is None:
            raise StoreError(
                f"the run's writer is not open; {rows.num_rows} rows of {dataset} were not stored"
            )
        folder = partition_folder(dataset, partition)
        check_rows(dataset, rows, partition)
        acknowledgement: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsettled.add(acknowledgement)
        if not self._gathered and (lane := current_lane()) is not None:
            self._lane = lane.sibling(self._lane_name)
        self._gathered.setdefault(folder, []).append(PendingRows(rows, acknowledgement))
        self._set_timer()
        # Shielded: a caller that is cancelled must not cancel the future that the commit completes.
        return asyncio.shield(acknowledgement)

    @contextmanager
    def expect_rows(self) -> Iterator[None]:
        """Say that rows will be appended in the block: meanwhile commits wait `flush_s`, to store many rows in few shards.

        After the last of the blocks that are open at one time a commit begins at once, and so it does without any.
        """
        self._n_expecting += 1
        try:
            yield
        finally:
            self._n_expecting -= 1
            if not self._n_expecting:
                self._commit()

    async def store(self, dataset: str, rows: pa.RecordBatch, **partition: PartitionValue) -> None:
        """Append rows that a step waits for, and return when they are stored, without waiting for `flush_s`.

        Raises:
            SchemaError: as for `append`.
            StoreError: as for `append`, or the rows could not be stored.
        """
        stored = self.append(dataset, rows, **partition)
        self._is_urgent = True
        self._commit()
        await stored

    @property
    def n_shards(self) -> int:
        """Number that the writer's next shard gets."""
        return self._n_shards

    def count_from(self, number: int) -> None:
        """Give later shards numbers of at least `number`, so that they sort after those of other processes of the run's epoch."""
        self._n_shards = max(self._n_shards, number)

    def note_written(self, events: Iterable[ShardEvent]) -> None:
        """Register shards that another process of the run's epoch has written, for the next call of `note`; later shards sort after them."""
        events = list(events)
        self._note(events)
        names = (ShardName.of(each.shard) for each in events)
        self.count_from(
            max((name.number + 1 for name in names if name and name.epoch == self._epoch), default=0)
        )

    async def find_unrecorded(self) -> None:
        """Register the shards of killed writers, which the inventory lacks, as `note_written` does; raises ShardError if it cannot be read."""
        if self._inventory is not None:
            find = self._inventory.find
            self.note_written(await asyncio.get_running_loop().run_in_executor(self._thread, find))

    @property
    def n_waiting(self) -> int:
        """Number of calls of `append` whose rows are not stored yet."""
        return len(self._unsettled)

    async def flush(self) -> None:
        """Store what was appended so far, without waiting for `flush_s`; raises the first StoreError of what could not be stored."""
        appended = set(self._unsettled)
        waiting = appended
        # A commit that is running has only what was appended before it began, so that another may have to follow.
        while waiting:
            self._commit()
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for acknowledgement in appended:
            acknowledgement.result()

    async def note(self) -> None:
        """Record the shards written and removed since the last call in the inventory; after a StoreError the next call tries again."""
        if self._inventory is None or not (notes := self._inventory.take()):
            return
        try:
            await self.store(INVENTORY, self._inventory.rows(notes), epoch=self._epoch)
        except StoreError:
            self._inventory.add(notes)
            raise

    def record_removal(self, keys: Iterable[str]) -> None:
        """Register that shards were, or will be, removed; the next call of `note` records that.

        A missing shard that is recorded as written is a finding of `verify`, unless a compacted one replaces it. If none
        does, call this and `note` before the shard is removed.
        """
        self._note(ShardEvent(key, "removed") for key in keys)

    def _note(self, notes: Iterable[ShardEvent]) -> None:
        if self._inventory is not None:
            self._inventory.add(notes)

    async def compact(self, folder: str, large_bytes: int) -> str:
        """Compact the shards of a partition's folder into one, concurrently with commits; returns its key, empty if there is nothing to do.

        A partition whose shards have `large_bytes` or more on average is left as it is. See rollmill.tasks.store.shards.shard_compaction.

        Raises:
            ShardError: a shard of the partition cannot be read, or its rows are not right; nothing changed.
            StoreError: the compacted shard could not be stored, or the writer is not open.
        """
        return await self._in_place(
            folder, partial(compact_partition, self._files, folder, large_bytes=large_bytes)
        )

    async def replace(self, dataset: str, rows: pa.RecordBatch, **partition: PartitionValue) -> None:
        """Replace all rows of a partition, for derived rows that are computed again.

        Raises:
            SchemaError: the rows do not have the data set's schema, or belong to another partition.
            StoreError: they could not be stored, or the writer is not open; nothing changed.
        """
        folder = partition_folder(dataset, partition)
        check_rows(dataset, rows, partition)
        await self._in_place(folder, partial(_store_rows, self._files, folder, [rows]))

    async def _in_place(self, folder: str, store: Callable[[ShardName], ShardEvent | None]) -> str:
        """Store a shard that replaces those a partition has now, concurrently with commits; returns its key, empty if there is none."""
        if self._thread is None or self._compacting is None:
            raise StoreError(f"the run's writer is not open; {folder} was not changed")
        name = ShardName(self._epoch, self._n_shards, is_compacted=True)
        self._n_shards += 1
        loop = asyncio.get_running_loop()
        # Commits run one after another in this thread, so every commit with a smaller number is stored after this call.
        await loop.run_in_executor(self._thread, _do_nothing)

        def store_and_note() -> str:
            # In the thread: a caller that is cancelled meanwhile cannot keep the shard out of the inventory.
            event = store(name)
            self._note([event] if event else [])
            return event.shard if event else ""

        return await loop.run_in_executor(self._compacting, store_and_note)

    async def remove(self, keys: Sequence[str]) -> None:
        """Remove superseded shards; raises StoreError if one cannot be removed, or the writer is not open."""
        if self._compacting is None:
            raise StoreError(f"the run's writer is not open; {len(keys)} superseded shards were not removed")

        def remove() -> None:
            self._files.remove(keys)
            self.record_removal(keys)

        await asyncio.get_running_loop().run_in_executor(self._compacting, remove)

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        try:
            await self.flush()
            await self.note()
        except StoreError:
            # The error that ends the context is the one to report; the rows' own callers get this one.
            if error is None:
                raise
        finally:
            self._close()

    def _set_timer(self) -> None:
        if self._gathered and self._timer is None and not self._is_committing:
            waits = self._n_expecting and not self._is_urgent
            delay_s = self.flush_s if waits else 0.0
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._commit)

    def _take(self) -> tuple[PendingByFolder, int]:
        """Remove and return the pending rows, with the number that their first shard gets."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_urgent = False
        gathered, self._gathered = self._gathered, {}
        first, self._n_shards = self._n_shards, self._n_shards + len(gathered)
        return gathered, first

    def _commit(self) -> None:
        """Start a commit of the pending rows; if one is running, its end starts the next."""
        if self._is_committing or not self._gathered or self._thread is None:
            return
        gathered, first = self._take()
        self._is_committing = True
        work = partial(
            commit_rows, self._files, self._epoch, first, _rows_by_folder(gathered), dict(self._lost)
        )
        storing = span("storing").begin(self._lane)
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        running.add_done_callback(partial(self._end_commit, gathered, storing))

    def _end_commit(self, gathered: PendingByFolder, storing: OpenSpan, running: asyncio.Future[Any]) -> None:
        self._is_committing = False
        storing.end()
        self._settle(gathered, *running.result())
        self._set_timer()

    def _settle(
        self, gathered: PendingByFolder, failed: Mapping[str, StoreError], written: Iterable[ShardEvent]
    ) -> None:
        self._note(written)
        self._lost |= failed
        for folder, appended in gathered.items():
            for each in appended:
                self._unsettled.discard(each.acknowledgement)
                if folder in failed:
                    each.acknowledgement.set_exception(failed[folder])
                else:
                    each.acknowledgement.set_result(None)

    def _close(self) -> None:
        """Shut down, and store all rows that are still pending, without an await, which could be cancelled."""
        compacting, self._compacting = self._compacting, None
        if compacting is not None:
            compacting.shutdown(wait=True, cancel_futures=True)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        gathered, first = self._take()
        rows = _rows_by_folder(gathered)
        self._settle(gathered, *commit_rows(self._files, self._epoch, first, rows, self._lost))
        if self._inventory is not None and (notes := self._inventory.take()):
            folder = partition_folder(INVENTORY, {"epoch": self._epoch})
            commit_rows(self._files, self._epoch, self._n_shards, {folder: [self._inventory.rows(notes)]})


def _do_nothing() -> None:
    """Do nothing: run in a thread's queue, it shows that all work queued before it is done."""


def _rows_by_folder(gathered: PendingByFolder) -> dict[str, list[pa.RecordBatch]]:
    return {folder: [each.rows for each in appended] for folder, appended in gathered.items()}
