"""Cache rows of a run that is read repeatedly while it grows.

A partition is read again only if its shards changed. The cache holds small columns only, no tokens and no conversations.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TypeAlias

import polars as pl
import pyarrow as pa
import xxhash

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import PartitionValue, RunFolder, partition_pattern
from rollmill.tasks.store.reader import read_listed, read_shard, scan
from rollmill.tasks.store.schemas import dataset_schema
from rollmill.tasks.store.shards.shard_names import current_shards

LONG = {"token_ids", "loss_mask", "logprobs", "messages", "example", "outcome", "experts", "entropy", "ratio"}
"""Columns with up to megabytes a row, which are not cached."""


_CacheKey: TypeAlias = tuple[str, tuple[str, ...]]
"""Cache key: partition pattern and columns."""


@dataclass(frozen=True, slots=True)
class _CachedRows:
    """Cached rows, and the keys of the shards that they were read from; valid as long as these shards are listed."""

    shards: tuple[str, ...]
    rows: pl.DataFrame


class RowCache:
    """Cache of one run's rows; safe to use from several threads.

    A list of shards is reused for `fresh_s` seconds. `together` has, by data set, columns to read at once if one of them is needed:
    opening a shard costs more than a column.
    """

    def __init__(
        self, folder: RunFolder, fresh_s: float, together: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.folder, self._fresh_s, self._together = folder, fresh_s, together or {}
        self._files, self._lock = open_files(folder), threading.Lock()
        self._building: defaultdict[_CacheKey, threading.Lock] = defaultdict(threading.Lock)
        self._listed: dict[str, tuple[float, list[str]]] = {}
        self._kept: dict[_CacheKey, _CachedRows] = {}

    def scan(
        self,
        folder: RunFolder,
        dataset: str,
        columns: Sequence[str] | None = None,
        **partition: PartitionValue,
    ) -> pl.LazyFrame:
        """Return a lazy frame of cached rows; they are read uncached if all columns or long texts are wanted.

        `folder` must be the run of the cache. Like `rollmill.tasks.store.reader.scan` otherwise.
        """
        # A page needs such columns of a few rows only, and all of them would fill the memory.
        if columns is None or LONG & set(columns) or not columns:
            return scan(folder, dataset, columns, **partition)
        return self.rows(dataset, columns, **partition).lazy()

    def rows(self, dataset: str, columns: Sequence[str], **partition: PartitionValue) -> pl.DataFrame:
        """Return columns of a data set, or of the given partitions; the same DataFrame object until a shard is added.

        Raises:
            SchemaError: unknown data set or partition.
            ShardError: a shard cannot be read.
        """
        pattern, wanted = partition_pattern(dataset, partition), tuple(columns)
        together = tuple(self._together.get(dataset, ()))
        shards = tuple(self._shards(dataset, pattern))
        # Several requests for the same rows wait for the one that reads them.
        with self._lock:
            lock = self._building[pattern, wanted]
        with lock:
            kept = self._kept.get((pattern, wanted))
            if kept is None or kept.shards != shards:
                is_narrow = wanted != together and set(wanted) <= set(together)
                rows = (
                    self.rows(dataset, together, **partition).select(wanted)
                    if is_narrow
                    else self._read(dataset, shards, wanted)
                )
                kept = self._kept[pattern, wanted] = _CachedRows(shards, rows)
        return kept.rows

    def steps(self, dataset: str) -> list[int]:
        """Return the steps (policy versions for evaluations) that have shards, ascending."""
        keys = self._shards(dataset, partition_pattern(dataset, {}))
        return sorted({int(key.split("/")[-2].rpartition("=")[2]) for key in keys})

    def revision(self, datasets: Sequence[str]) -> str:
        """Return a text that changes when the shards of one of these data sets change."""
        names = [key for each in datasets for key in self._shards(each, partition_pattern(each, {}))]
        return str(xxhash.xxh3_64_hexdigest("\n".join(names).encode()))

    def _read(self, dataset: str, shards: Sequence[str], columns: tuple[str, ...]) -> pl.DataFrame:
        """Return the rows of these shards, in order of their partitions; partitions that are cached are not read again."""
        by_folder = {
            place: tuple(keys) for place, keys in groupby(shards, key=lambda key: key.rpartition("/")[0])
        }
        kept = {place: self._kept.get((place, columns)) for place in by_folder}
        new = {
            place: keys for place, keys in by_folder.items() if not (it := kept[place]) or it.shards != keys
        }
        tables = {place: self._tables(place, keys, columns) for place, keys in new.items()}
        # One conversion from Arrow of all shards is quicker than one of each by far.
        every = [each for found in tables.values() for each in found]
        rows = pl.from_arrow(
            pa.concat_tables(every or [dataset_schema(dataset).empty_table().select(columns)])
        )
        assert isinstance(rows, pl.DataFrame)
        at = 0
        for place, keys in new.items():
            n = sum(each.num_rows for each in tables[place])
            self._kept[place, columns] = _CachedRows(keys, rows.slice(at, n))
            at += n
        if len(new) == len(by_folder):
            return rows.rechunk()
        return pl.concat([self._kept[place, columns].rows for place in by_folder], rechunk=True)

    def _tables(self, place: str, keys: tuple[str, ...], columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the tables of one partition's shards; none if the partition was removed meanwhile."""
        known = iter([list(keys)])
        return read_listed(
            lambda: next(known, None) or self._listing(f"{place}/*.arrow"),
            lambda key: read_shard(self.folder, key, columns),
            self._files.reads_at_once,
        )

    def _shards(self, dataset: str, pattern: str) -> list[str]:
        """Return the keys of the shards of some partitions, listed at most `fresh_s` seconds ago."""
        with self._lock:
            at, keys = self._listed.get(dataset, (float("-inf"), []))
            if time.monotonic() - at > self._fresh_s:
                keys = self._listing(f"{partition_pattern(dataset, {})}/*.arrow")
                self._listed[dataset] = (time.monotonic(), keys)
        return [key for key in keys if fnmatchcase(key.rpartition("/")[0], pattern)]

    def _listing(self, pattern: str) -> list[str]:
        return current_shards(self._files.keys(pattern))
