"""Compacts a run in the background and removes superseded shards, at the earliest after a grace period."""

import asyncio
from collections.abc import Callable, Collection
from typing import Self

import pyarrow as pa

from rollmill.tasks.errors import ShardError, ShardGoneError, StoreError
from rollmill.tasks.observe.spans import within
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import Files
from rollmill.tasks.store.folders import PARTITION_KEYS, partition_pattern, step_from_key
from rollmill.tasks.store.shards.integrity import open_shard
from rollmill.tasks.store.shards.shard_compaction import group_by_partition
from rollmill.tasks.store.shards.shard_names import ShardName, current_shards, list_superseded_shards
from rollmill.tasks.store.shards.writer import RunWriter

# Mean size of a partition's shards from which on they stay as they are: merging larger ones copies much and gains
# little.
LARGE_BYTES = 8 << 20


class Compactor:
    """Joins the small shards of each partition of a run into one, in the background; an async context manager for one event loop.

    Compacting is housekeeping: a partition that cannot be compacted causes one warning and stays readable as it is.
    Leaving the context, which must be before the writer is closed, cancels what is running. If a run ends before its superseded shards
    may be deleted, they are deleted when it is resumed.
    """

    def __init__(
        self, files: Files, writer: RunWriter, config: StoreConfig, warn: Callable[[str], None]
    ) -> None:
        self._files, self._writer, self._config, self._warn = files, writer, config, warn
        self._tasks = asyncio.TaskGroup()
        self._rounds: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._leaving: set[str] = set()
        self._made: set[str] = set()
        self._begun = 0
        self.n_failed = 0

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        for each in self._rounds:
            each.cancel()
        # Given the error, it would wrap it.
        await self._tasks.__aexit__(None, None, None)

    def begin(self, version: int) -> None:
        """Start compacting, in the background, all steps below a version that is trained and checkpointed.

        The first call of a process covers all of them, later calls those since the call before.
        """
        if self._config.compact != "never" and version > self._begun:
            self._start(self._begun, version)
            self._begun = version

    async def finish(self) -> None:
        """Compact everything that is stored; returns after the grace period, when no superseded shard is left.

        With `store.compact: never` shards that an earlier process superseded are still removed.
        """
        self._start(0, None)
        await self.settle()

    async def settle(self) -> None:
        """Wait until every compaction that was begun has ended."""
        while self._rounds:
            await asyncio.wait(self._rounds)

    def _start(self, first: int, end: int | None) -> None:
        each = self._tasks.create_task(self._round(first, end))
        self._rounds.add(each)
        each.add_done_callback(self._rounds.discard)

    async def _round(self, first: int, end: int | None) -> None:
        """Compact the partitions of the steps first .. end - 1 (`end` None: of all), and remove superseded shards if due.

        They are due for removal if `end` is None, or with `store.compact: after_grace`.
        """
        with within(lane="compaction"):
            # One round at a time: two would compact the same partition.
            async with self._lock:
                keys = await asyncio.to_thread(self._keys, first, end)
                if self._config.compact != "never":
                    for folder, shards in group_by_partition(keys).items():
                        keys += await self._compact_partition(folder) if len(shards) > 1 else []
                # Another round may be waiting out the grace period of some of them.
                gone = sorted(set(list_superseded_shards(keys)) - self._leaving)
            if gone and (end is None or self._config.compact == "after_grace"):
                await self._remove(await self._select_replaced(gone, keys))

    async def _select_replaced(self, gone: Collection[str], keys: Collection[str]) -> list[str]:
        """Select the superseded shards of `gone` whose replacement is whole; a damaged one is reported.

        One that an earlier process made is read for this. If it is damaged, only the shards that it replaces have its rows.
        """
        replacements = {key.rpartition("/")[0]: key for key in current_shards(keys) if _is_compacted(key)}
        damaged = set()
        for folder in {key.rpartition("/")[0] for key in gone}:
            if (key := replacements[folder]) not in self._made:
                try:
                    await asyncio.to_thread(_check_shard, self._files, key)
                except StoreError as error:
                    damaged.add(folder)
                    self._report(error)
        return [key for key in gone if key.rpartition("/")[0] not in damaged]

    async def _remove(self, keys: list[str]) -> None:
        """Wait for the grace period, then remove superseded shards."""
        self._leaving |= set(keys)
        # A reader that has listed the small shards may not have opened them yet.
        await asyncio.sleep(self._config.compaction_grace_s)
        try:
            await self._writer.remove(keys)
        except StoreError as error:
            self._report(error)
        self._leaving -= set(keys)

    async def _compact_partition(self, folder: str) -> list[str]:
        """Compact a partition; returns the key of the compacted shard in a list, empty if there is none."""
        try:
            key = await self._writer.compact(folder, LARGE_BYTES)
        except ShardGoneError:
            # Its rows were removed meanwhile, as old routed experts are.
            return []
        except StoreError as error:
            self._report(error)
            return []
        self._made |= {key} if key else set()
        return [key] if key else []

    def _keys(self, first: int, end: int | None) -> list[str]:
        """List the keys of every shard of the steps first .. end - 1; with `end` None those of all partitions."""
        if first == 0:
            found = _list_shards(self._files, [partition_pattern(name, {}) for name in PARTITION_KEYS])
            return [
                key
                for key in found
                if end is None or ((step := step_from_key(key)) is not None and step < end)
            ]
        assert end is not None
        by_step = [
            partition_pattern(name, {keys[-1]: step})
            for name, keys in PARTITION_KEYS.items()
            if keys[-1] in ("step", "version")
            for step in range(first, end)
        ]
        return _list_shards(self._files, by_step)

    def _report(self, error: StoreError) -> None:
        self.n_failed += 1
        self._warn(f"compaction: {error}")


def _list_shards(files: Files, folders: Collection[str]) -> list[str]:
    return [key for folder in folders for key in files.keys(f"{folder}/*.arrow")]


def _is_compacted(key: str) -> bool:
    name = ShardName.of(key)
    return name is not None and name.is_compacted


def _check_shard(files: Files, key: str) -> None:
    """Read every byte of a shard; raises ShardError if it is damaged."""
    try:
        with files.open(key) as source:
            open_shard(source, key, key).check()
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"cannot read {key}: {error}") from error
