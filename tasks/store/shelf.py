"""Rows of a run that are read once and kept, for what looks at it again and again while it grows.

A partition is read again when it has other shards than before; the others are not opened. What is kept is columns
of which a row has little: no tokens, no conversations.
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

from tasks.store.filesystem import files_of
from tasks.store.layout import PartitionValue, RunFolder, partition_pattern
from tasks.store.names import current
from tasks.store.reader import read_listed, read_shard, scan
from tasks.store.schemas import schema_of

LONG = {"token_ids", "loss_mask", "logprobs", "messages", "example", "outcome", "experts", "entropy", "ratio"}
"""Columns of which a row can have megabytes; they are read each time that they are asked for."""


_Of: TypeAlias = tuple[str, tuple[str, ...]]
"""Pattern of partitions, and columns."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Rows, and what they are of: the same shards have the same rows."""

    shards: tuple[str, ...]
    rows: pl.DataFrame


class Shelf:
    """The rows of one run that were read so far; used from several threads.

    Args:
        folder: the run.
        fresh_s: a list of shards that is not older, in seconds, is not made again.
        together: by data set, columns that are read at once when one of them is asked for; opening a shard costs more.
    """

    def __init__(
        self, folder: RunFolder, fresh_s: float, together: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.folder, self._fresh_s, self._together = folder, fresh_s, together or {}
        self._files, self._lock = files_of(folder), threading.Lock()
        self._building: defaultdict[_Of, threading.Lock] = defaultdict(threading.Lock)
        self._listed: dict[str, tuple[float, list[str]]] = {}
        self._kept: dict[_Of, _Kept] = {}
        self._reading: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._read_together: dict[tuple[str, tuple[str, ...]], pl.DataFrame] = {}

    def scan(
        self,
        folder: RunFolder,
        dataset: str,
        columns: Sequence[str] | None = None,
        **partition: PartitionValue,
    ) -> pl.LazyFrame:
        """As `tasks.store.reader.scan`, which it takes the place of; `folder` is that of the shelf."""
        if columns is None or LONG & set(columns) or not columns:
            return scan(folder, dataset, columns, **partition)
        return self.rows(dataset, columns, **partition).lazy()

    def rows(self, dataset: str, columns: Sequence[str], **partition: PartitionValue) -> pl.DataFrame:
        """Some columns of a data set, or of the partitions given; the same object while nothing was added.

        Raises:
            SchemaError: unknown data set or partition.
            ShardError: a shard cannot be read.
        """
        pattern, wanted = partition_pattern(dataset, partition), tuple(columns)
        shards = tuple(self._shards(dataset, pattern))
        with self._lock:
            lock = self._building[pattern, wanted]
        with lock:
            kept = self._kept.get((pattern, wanted))
            if kept is None or kept.shards != shards:
                kept = _Kept(shards, self._some(dataset, shards, wanted))
                self._kept[pattern, wanted] = kept
        return kept.rows

    def steps(self, dataset: str) -> list[int]:
        """Steps (policy versions, of evaluations) of which a data set has shards, ascending."""
        keys = self._shards(dataset, partition_pattern(dataset, {}))
        return sorted({int(key.split("/")[-2].rpartition("=")[2]) for key in keys})

    def revision(self, datasets: Sequence[str]) -> str:
        """A text that changes when a data set among these has other shards than before."""
        names = [key for each in datasets for key in self._shards(each, partition_pattern(each, {}))]
        return str(xxhash.xxh3_64_hexdigest("\n".join(names).encode()))

    def _some(self, dataset: str, shards: tuple[str, ...], columns: tuple[str, ...]) -> pl.DataFrame:
        """Columns of shards, out of those that are read together with them where all are."""
        together = tuple(self._together.get(dataset, ()))
        if columns == together or not set(columns) <= set(together):
            return self._read(dataset, shards, columns)
        with self._reading[dataset]:
            kept = self._read_together.get((dataset, shards))
            if kept is None:
                kept = self._read(dataset, shards, together)
                if len({key.rpartition("/")[0] for key in shards}) > 1:
                    self._read_together = {
                        of: rows for of, rows in self._read_together.items() if of[0] != dataset
                    } | {(dataset, shards): kept}
        return kept.select(columns)

    def _read(self, dataset: str, shards: Sequence[str], columns: tuple[str, ...]) -> pl.DataFrame:
        """Rows of partitions in the order of their folders; those that are kept already are not opened."""
        by_folder = {
            place: tuple(keys) for place, keys in groupby(shards, key=lambda key: key.rpartition("/")[0])
        }
        kept = {place: self._kept.get((place, columns)) for place in by_folder}
        new = {
            place: keys for place, keys in by_folder.items() if not (it := kept[place]) or it.shards != keys
        }
        tables = {place: self._tables(place, keys, columns) for place, keys in new.items()}
        # One conversion of all is quicker than one of each by far.
        every = [each for found in tables.values() for each in found]
        rows = pl.from_arrow(pa.concat_tables(every or [schema_of(dataset).empty_table().select(columns)]))
        assert isinstance(rows, pl.DataFrame)
        at = 0
        for place, keys in new.items():
            n = sum(each.num_rows for each in tables[place])
            self._kept[place, columns] = _Kept(keys, rows.slice(at, n))
            at += n
        if len(new) == len(by_folder):
            return rows.rechunk()
        return pl.concat([self._kept[place, columns].rows for place in by_folder], rechunk=True)

    def _tables(self, place: str, keys: tuple[str, ...], columns: tuple[str, ...]) -> list[pa.Table]:
        """Rows of one partition, whose shards were these; none when it has been removed meanwhile."""
        known = iter([list(keys)])
        return read_listed(
            lambda: next(known, None) or self._listing(f"{place}/*.arrow"),
            lambda key: read_shard(self.folder, key, columns),
            self._files.reads_at_once,
        )

    def _shards(self, dataset: str, pattern: str) -> list[str]:
        """Keys of the shards of some partitions, of a list that is not older than it may be."""
        with self._lock:
            at, keys = self._listed.get(dataset, (float("-inf"), []))
            if time.monotonic() - at > self._fresh_s:
                keys = self._listing(f"{partition_pattern(dataset, {})}/*.arrow")
                self._listed[dataset] = (time.monotonic(), keys)
        return [key for key in keys if fnmatchcase(key.rpartition("/")[0], pattern)]

    def _listing(self, pattern: str) -> list[str]:
        return current(self._files.keys(pattern))
