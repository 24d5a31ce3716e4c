"""The data of the viewer's pages: cached rows, table pages, and a search in conversations.

A partition is read again only if its shards changed. Only small columns are cached, no tokens and no conversations.
"""

import contextlib
import json
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa
import xxhash

from rollmill.tasks.errors import ConfigError, RollmillError
from rollmill.tasks.look.tables.curves import Curves, read_curves
from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.look.tables.run_tables import GROUP_COLUMNS, make_run_view, select_groups
from rollmill.tasks.look.tables.scores import explain_scorers, resolve_scorer
from rollmill.tasks.look.tables.selection import Selection, select_partitions
from rollmill.tasks.look.tables.trajectory_table import (
    BATCH_COLUMNS,
    ROLLOUT_COLUMNS,
    SCORE_COLUMNS,
    TRAJECTORY_COLUMNS,
    UNSCORED,
    add_messages,
    check_has_rollouts,
    filter_trajectories,
    join_rewards,
    name_error_types,
)
from rollmill.tasks.look.tables.view import View, order_rows
from rollmill.tasks.look.terminal.trajectory_tokens import LoadTokenizer
from rollmill.tasks.store.attempts import last_attempts, short_id
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


MOST_FOUND = 1000
LONGEST_S = 5.0
"""Seconds after which a search stops and reports how far it got, and a condition in SQL is ended."""


def search_messages(
    folder: RunFolder, rows: pl.DataFrame, text: str, is_held_out: bool
) -> tuple[pl.DataFrame, str]:
    """Return the rows whose messages contain a text, in any case, and a note if not all steps were searched.

    The note is empty if they were. Steps are searched in the order of the rows. The text is searched in the stored JSON, so that
    no conversation is parsed; quotation marks and non-ASCII letters are searched as JSON writes them.
    """
    # Stored text has escapes, so what is searched is escaped in the same way.
    began, ids, note = time.monotonic(), list[str](), ""
    stored = json.dumps(text)[1:-1].lower()
    has = pl.col("messages").str.to_lowercase().str.contains(stored, literal=True)
    dataset, key = ("evaluations", "version") if is_held_out else ("rollouts", "step")
    steps = rows["step"].unique(maintain_order=True).to_list()
    for at, step in enumerate(steps):
        if len(ids) >= MOST_FOUND or time.monotonic() - began > LONGEST_S:
            note = (
                f"searched {at} of {len(steps)} steps, {steps[at - 1]} the last; give steps to search others"
            )
            break
        messages = scan(folder, dataset, ["trajectory_id", "messages"], **{key: step})
        ids += messages.filter(has).select("trajectory_id").collect()["trajectory_id"].to_list()
    return rows.filter(pl.col("trajectory_id").is_in(ids)), note


DATASETS = ("rollouts", "scores", "groups", "batches", "metrics", "evaluations", "annotations", "spans")
"""Data sets that pages show; a change in one of them changes the revision."""
TOGETHER = {
    "rollouts": [*ROLLOUT_COLUMNS, "attempt"],
    "groups": [*(column.name for column in GROUP_COLUMNS), "subgroup"],
    "scores": ["step", *SCORE_COLUMNS],
    "metrics": ["step", "name", "env", "stat", "value"],
    "evaluations": [*ROLLOUT_COLUMNS, "reward", "greedy", "policy_version", "example_id"],
}
"""Columns that pages need together, by data set."""
MOST_KEPT = 16
MOST_STEPS_READ = 12
"""Conversations are read only if the page's rows are in at most this many steps."""
CELL = 300
"""Most characters of a text in a table."""


@dataclass(frozen=True, slots=True)
class TablePage:
    """Some rows of a table, the number of rows of the whole table, and a remark next to that number; empty for none."""

    rows: list[dict[str, Any]]
    n: int
    note: str = ""


class RunData:
    """Cached access of the viewer's pages to the data of one run; safe to use from several threads.

    Attributes:
        others: further runs, which are compared with it.
    """

    def __init__(
        self, folder: RunFolder, fresh_s: float, tokenizer: LoadTokenizer, others: Sequence[RunFolder] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.others = [RunData(each, fresh_s, tokenizer) for each in others]
        self.folder, self.shelf = folder, RowCache(folder, fresh_s, TOGETHER)
        self._lock = threading.Lock()
        self._made: OrderedDict[object, tuple[tuple[int, ...], object, Any]] = OrderedDict()

    def all_runs(self) -> "list[RunData]":
        """Return the data of this run and of the others."""
        return [self, *self.others]

    def find_folder(self, asked: str) -> tuple[RunFolder, str]:
        """Return the folder and the id of a trajectory that is written RUN:ID, or ID for this run.

        Raises:
            ConfigError: the viewer shows no such run.
        """
        name, _, short = asked.rpartition(":")
        folders = {data.folder.name: data.folder for data in self.all_runs()}
        if name and name not in folders:
            raise ConfigError(
                "run", name, f"the viewer shows {', '.join(folders)}; start it with this run too"
            )
        return folders[name] if name else self.folder, short

    def revision(self) -> str:
        """Return a text that changes whenever there is new data of this run or of the others."""
        return " ".join(data.shelf.revision(DATASETS) for data in self.all_runs())

    def warm(self) -> None:
        """Read the data of the tables into the cache; errors are ignored here, and raised when a page needs the data."""
        with contextlib.suppress(RollmillError):
            self.trajectories(Selection(), "", 0, 0)
            self.curves()
            self.steps()
            self.trajectories(Selection(sort="-reward"), "", 0, 0)

    def curves(self) -> Curves:
        """Return the data of the run's charts, by step."""
        made: Curves = self.derive("curves", self.parts(), lambda: read_curves(self.folder, self.shelf.scan))
        return made

    def steps(self) -> View:
        """Return the table of steps with the run's totals."""
        made: View = self.derive(
            "steps", self.parts(), lambda: make_run_view(self.folder, scan=self.shelf.scan)
        )
        return made

    def parts(self) -> list[str]:
        """Return the `parts` for `derive` of results that depend on the whole run; they change whenever data are added."""
        # `derive` compares identities, and equal texts are one object only if they are interned.
        return [sys.intern(self.revision())]

    def derive(self, of: object, parts: Sequence[object], make: Callable[[], Any]) -> Any:
        """Return `make()`, cached under the key `of` until one of `parts` is another object."""
        ids = tuple(id(part) for part in parts)
        with self._lock:
            kept = self._made.pop(of, None)
        if kept is None or kept[0] != ids:
            # The parts are kept too: the id of a deleted object is reused, and would match another object.
            kept = (ids, parts, make())
        with self._lock:
            self._made[of] = kept
            while len(self._made) > MOST_KEPT:
                self._made.popitem(last=False)
        return kept[2]

    def groups(self, selection: Selection, start: int, stop: int) -> TablePage:
        """Return rows `start` to `stop` of the selected groups, newest step first unless the selection sorts them."""
        rows = select_groups(self.folder, selection, self._steps("groups", selection), self.shelf.scan)
        if not selection.sort:
            rows = rows.sort(-pl.col("step"), "group", "subgroup")
        rows = order_rows(rows, GROUP_COLUMNS, selection.sort, 0)
        return TablePage(rows.slice(start, stop - start).to_dicts(), len(rows))

    def trajectories(
        self, selection: Selection, text: str, start: int, stop: int, where: str = ""
    ) -> TablePage:
        """Return rows `start` to `stop` of the selected trajectories, newest step first unless the selection sorts them.

        `text` is searched in conversations; `where` is a condition in SQL on the view `trajectories`, for held-out trajectories on the
        data set `evaluations`; empty for none.
        """
        scorer = None
        if selection.evaluations:
            rows = self.shelf.rows("evaluations", [*ROLLOUT_COLUMNS, "reward", "greedy"])
            rows = rows.with_columns(pl.lit(None, pl.Float32).alias("advantage"))
            rows = rows.sort(-pl.col("step"), "group", "sample")
        else:
            check_has_rollouts(self.folder)
            scorer = resolve_scorer(self.folder, selection.scorer)
            rows = self._read_sampled(selection, scorer)
        of, note = (selection, scorer), ""
        rows = self.derive(("selected", of), [rows], lambda: self._select(rows, selection))
        if where:
            rows = self._filter(rows, selection, scorer, where)
        if text:
            rows, note = self.derive(
                ("found", of, where, text),
                [rows],
                lambda: search_messages(self.folder, rows, text, selection.evaluations),
            )
        shown = rows.slice(start, stop - start)
        if "reward" not in shown.columns:
            shown = self._add_rewards(shown, scorer)
        if shown["step"].n_unique() > MOST_STEPS_READ:
            page = [{"trajectory": short_id(row["trajectory_id"]), **row} for row in shown.to_dicts()]
        else:
            page = add_messages(self.folder, shown, is_held_out=selection.evaluations)
            for row in page:
                row.pop("messages")
        explained = explain_scorers(self.folder, scorer) if scorer else []
        return TablePage(name_error_types(page), len(rows), " · ".join(filter(None, (note, *explained))))

    def _filter(
        self, rows: pl.DataFrame, selection: Selection, scorer: str | None, where: str
    ) -> pl.DataFrame:
        """Return the rows that meet a condition in SQL; raises ConfigError for what is none."""
        frames, evaluations = RunFrames([self.folder], scorer or ""), selection.evaluations
        ids = self.derive(
            ("where", evaluations, scorer, where),
            self.parts(),
            lambda: frames.find_trajectories("where", where, LONGEST_S, evaluations=evaluations),
        )
        made: pl.DataFrame = self.derive(
            ("met", selection, scorer, where),
            [rows, ids],
            lambda: rows.filter(pl.col("trajectory_id").is_in(ids.implode())),
        )
        return made

    def _steps(self, dataset: str, selection: Selection) -> list[int] | None:
        """Return the selected steps of a data set (policy versions for evaluations); None: all are selected."""
        key = "version" if dataset == "evaluations" else "step"
        return select_partitions(self.folder, dataset, key, selection.steps, self.shelf.steps(dataset))

    def _read_sampled(self, selection: Selection, scorer: str | None) -> pl.DataFrame:
        """Return the last attempt of each rollout, newest step first, with rewards and advantages if the selection needs them."""
        plain = self.shelf.rows("rollouts", [*ROLLOUT_COLUMNS, "attempt"])
        rows: pl.DataFrame = self.derive("rollouts", [plain], lambda: _newest_first(plain))
        is_sorted_by_score = selection.sort.removeprefix("-") in ("reward", "advantage", "error")
        # Most tables are in order of steps: then the scores of the rows of one page are enough, not those of a million.
        if selection.reward is None and UNSCORED not in selection.status and not is_sorted_by_score:
            return rows
        batches = self.shelf.rows("batches", BATCH_COLUMNS)
        scores = self.shelf.rows("scores", SCORE_COLUMNS, scorer=scorer) if scorer else None

        def join() -> pl.DataFrame:
            lazy = None if scores is None else scores.lazy()
            return _newest_first(join_rewards(rows.lazy(), batches.lazy(), lazy).collect())

        joined: pl.DataFrame = self.derive(("judged", scorer), [rows, batches, scores], join)
        return joined

    def _select(self, rows: pl.DataFrame, selection: Selection) -> pl.DataFrame:
        steps = self._steps("evaluations" if selection.evaluations else "rollouts", selection)
        if steps is not None:
            rows = rows.filter(pl.col("step").is_in(steps))
        if selection.group is not None:
            rows = rows.filter(pl.col("group") == selection.group)
        rows = filter_trajectories(rows, selection)
        sort = selection.sort
        # The short id is made for the rows of a page alone, and as text 10.0 would come before 2.0.
        if sort.removeprefix("-") == "trajectory":
            return rows.sort("group", "sample", descending=sort.startswith("-"))
        return order_rows(rows, TRAJECTORY_COLUMNS, sort, 0)

    def _add_rewards(self, shown: pl.DataFrame, scorer: str | None) -> pl.DataFrame:
        """Return the rows of one page with rewards and advantages; scores of other steps are not read."""
        steps = shown["step"].unique().to_list()

        def of(dataset: str, columns: list[str], **outer: str) -> pl.LazyFrame:
            parts = [self.shelf.rows(dataset, columns, **outer, step=step) for step in steps]
            # Without rows there is no step to read; a step of a run that has none yet gives the columns.
            return pl.concat(parts or [self.shelf.rows(dataset, columns, **outer, step=0)]).lazy()

        scores = of("scores", SCORE_COLUMNS, scorer=scorer) if scorer else None
        rows = join_rewards(shown.lazy(), of("batches", BATCH_COLUMNS), scores).collect()
        # A join does not keep the order of the page.
        return shown.select("trajectory_id").join(rows, on="trajectory_id", how="left", maintain_order="left")


def _newest_first(rows: pl.DataFrame) -> pl.DataFrame:
    # Without a second attempt every row is a last one, and a million rows are not grouped for nothing.
    if len(rows) and rows["attempt"].max() != 0:
        rows = last_attempts(rows.lazy()).collect()
    return rows.sort(-pl.col("step"), "group", "sample")
