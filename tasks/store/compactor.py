"""Compacts a run beside its steps, and removes what was superseded, a grace period later at the earliest."""

import asyncio
import re
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

from tasks.errors import ShardGoneError, StoreError
from tasks.observe.spans import within
from tasks.store.compaction import partitions
from tasks.store.config import StoreConfig
from tasks.store.filesystem import Files
from tasks.store.layout import PARTITION_KEYS, partition_pattern
from tasks.store.names import superseded
from tasks.store.writer import RunWriter

_STEP = re.compile(r"/(?:step|version)=(\d+)/")


class Compactor:
    """Compacts partitions of one run through its writer; an async context manager, used from one event loop.

    Compacting is housekeeping: what cannot be compacted or removed is told once and left as it is, readable as before,
    and the run goes on. Leaving the context ends what goes on; superseded shards that a run left which ended before
    their time go when it is gone on with.

    Args:
        files: of the run.
        writer: of the run, which is open as long as this is.
        config: whether to compact, what, and the grace.
        warn: tells people something.
    """

    def __init__(
        self, files: Files, writer: RunWriter, config: StoreConfig, warn: Callable[[str], None]
    ) -> None:
        self._files, self._writer, self._config, self._warn = files, writer, config, warn
        self._tasks = asyncio.TaskGroup()
        self._rounds: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._leaving: set[str] = set()
        self._begun = 0
        self.n_failed = 0

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._rounds:
            each.cancel()
        await self._tasks.__aexit__(None, None, None)  # given the error, it would wrap it

    def begin(self, version: int) -> None:
        """Compact the steps below a version that is trained and checkpointed, beside what goes on.

        The first call of a process goes over all of them, the later ones over those that came since.
        """
        if self._config.compact and version > self._begun:
            self._start(self._begun, version)
            self._begun = version

    async def finish(self) -> None:
        """Compact all that is stored by now; returns when no superseded shard is left, a grace period later.

        With `store.compact: false` what an earlier process superseded is removed all the same.
        """
        self._start(0, None)
        await self.settled()

    async def settled(self) -> None:
        """Wait for what was begun so far."""
        while self._rounds:
            await asyncio.wait(self._rounds)

    def _start(self, first: int, end: int | None) -> None:
        each = self._tasks.create_task(self._compact(first, end))
        self._rounds.add(each)
        each.add_done_callback(self._rounds.discard)

    async def _compact(self, first: int, end: int | None) -> None:
        with within(lane="compaction"):
            await self._round(first, end)

    async def _round(self, first: int, end: int | None) -> None:
        """Compact the partitions of the steps first .. end - 1, and remove what is superseded when it is time for it."""
        async with self._turn:
            keys = await asyncio.to_thread(self._keys, first, end)
            if self._config.compact:
                for folder, shards in partitions(keys).items():
                    keys += await self._compacted(folder) if len(shards) > 1 else []
            gone = sorted(set(superseded(keys)) - self._leaving)
        if gone and (end is None or self._config.remove_superseded == "after_grace"):
            await self._remove(gone)

    async def _remove(self, keys: list[str]) -> None:
        """Remove superseded shards after the grace."""
        self._leaving |= set(keys)
        await asyncio.sleep(self._config.compaction_grace_s)
        try:
            await self._writer.remove(keys)
        except StoreError as error:
            self._tell(error)
        self._leaving -= set(keys)

    async def _compacted(self, folder: str) -> list[str]:
        """Compact a partition; returns the key of the compacted shard, if there is one."""
        try:
            key = await self._writer.compact(folder, self._config.compaction_large_bytes)
        except ShardGoneError:
            return []  # its rows were removed meanwhile, as old routed experts are
        except StoreError as error:
            self._tell(error)
            return []
        return [key] if key else []

    def _keys(self, first: int, end: int | None) -> list[str]:
        """Every shard of the steps first .. end - 1; of all partitions, those that have no step too, without an end."""
        if first == 0:
            found = _listed(self._files, [partition_pattern(name, {}) for name in PARTITION_KEYS])
            return [key for key in found if end is None or _is_below(key, end)]
        assert end is not None
        by_step = [
            partition_pattern(name, {keys[-1]: step})
            for name, keys in PARTITION_KEYS.items()
            if keys[-1] in ("step", "version")
            for step in range(first, end)
        ]
        return _listed(self._files, by_step)

    def _tell(self, error: StoreError) -> None:
        self.n_failed += 1
        self._warn(f"compaction: {error}")


def _listed(files: Files, folders: Collection[str]) -> list[str]:
    return [key for folder in folders for key in files.keys(f"{folder}/*.arrow")]


def _is_below(key: str, end: int) -> bool:
    found = _STEP.search(key)
    return found is not None and int(found[1]) < end
