"""What the viewer's tables read of a run: rows that are kept while the run does not change, and the page asked for."""

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from flows.looking.curves import Curves, read_curves
from flows.looking.inspection import GROUP_COLUMNS, run_view, selected_groups
from flows.looking.ordering import ordered
from flows.looking.scored import scorer_of
from flows.looking.selection import Selection, known_value
from flows.looking.trajectories import (
    BATCH_COLUMNS,
    COLUMNS,
    PLAIN,
    SCORE_COLUMNS,
    STATUSES,
    UNSCORED,
    check_sampled,
    filtered,
    judged,
    with_messages,
)
from flows.looking.view import View
from flows.viewer.text_search import search
from tasks.errors import ConfigError, RollmillError
from tasks.store.attempts import last_attempts, short_id
from tasks.store.layout import RunFolder
from tasks.store.shelf import Shelf

DATASETS = ("rollouts", "scores", "groups", "batches", "metrics", "evaluations", "annotations", "spans")
"""What pages show; a change in one of them is a change of the run."""
TOGETHER = {
    "rollouts": [*PLAIN, "attempt"],
    "groups": [*(column.name for column in GROUP_COLUMNS), "subgroup"],
    "scores": ["step", *SCORE_COLUMNS],
    "metrics": ["step", "name", "env", "stat", "value"],
    "evaluations": [*PLAIN, "reward", "greedy", "policy_version", "example_id"],
}
"""Columns of which pages need several, of one data set or another."""
MOST_KEPT = 16
MOST_STEPS_READ = 12
"""Conversations of a page's rows are read when they lie in no more steps than this."""
CELL = 300
"""Most characters of a text in a table."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows of a table.

    Attributes:
        n: rows that the whole table has.
        note: what is to be said beside the number; empty for nothing.
    """

    rows: list[dict[str, Any]]
    n: int
    note: str = ""


class Source:
    """One run as the viewer's pages read it; used from several threads."""

    def __init__(self, folder: RunFolder, fresh_s: float) -> None:
        self.folder, self.shelf = folder, Shelf(folder, fresh_s, TOGETHER)
        self._lock = threading.Lock()
        self._made: OrderedDict[object, tuple[tuple[int, ...], object, Any]] = OrderedDict()

    def revision(self) -> str:
        """Changes whenever there is something new to show."""
        return self.shelf.revision(DATASETS)

    def warm(self) -> None:
        """Read what the tables need, before somebody asks; what cannot be read is told where it is asked for."""
        with contextlib.suppress(RollmillError):
            self.trajectories(Selection(), "", 0, 0)
            self.curves()
            self.steps()
            self.trajectories(Selection(sort="-reward"), "", 0, 0)

    def curves(self) -> Curves:
        """The run by step, as curves."""
        made: Curves = self.made("curves", self.parts(), lambda: read_curves(self.folder, self.shelf.scan))
        return made

    def steps(self) -> View:
        """The table of steps, and the run's totals."""
        made: View = self.made("steps", self.parts(), lambda: run_view(self.folder, scan=self.shelf.scan))
        return made

    def parts(self) -> list[str]:
        """What `made` is told of something that is of the whole run: the same object while the run is the same."""
        return [sys.intern(self.revision())]

    def made(self, of: object, parts: Sequence[object], make: Callable[[], Any]) -> Any:
        """What `make` makes of these parts, made again when they are others; `of` says what it is."""
        ids = tuple(id(part) for part in parts)
        with self._lock:
            kept = self._made.pop(of, None)
        if kept is None or kept[0] != ids:
            kept = (ids, parts, make())  # the parts stay, so that their ids stay theirs
        with self._lock:
            self._made[of] = kept
            while len(self._made) > MOST_KEPT:
                self._made.popitem(last=False)
        return kept[2]

    def groups(self, selection: Selection, start: int, stop: int) -> Page:
        """Rows of the table of groups, the newest step first unless another order is asked for."""
        steps = self._steps("groups", selection)
        rows = selected_groups(self.folder, selection, steps, self.shelf.scan)
        if not selection.sort:
            rows = rows.sort(-pl.col("step"), "group", "subgroup")
        rows = ordered(rows, GROUP_COLUMNS, selection.sort, 0)
        return Page(rows.slice(start, stop - start).to_dicts(), len(rows))

    def trajectories(self, selection: Selection, text: str, start: int, stop: int) -> Page:
        """Rows of the table of trajectories, the newest step first unless another order is asked for."""
        if selection.evaluations:
            rows, scorer = self._held_out(selection), None
        else:
            check_sampled(self.folder)
            scorer = scorer_of(self.folder, selection.scorer)
            rows = self._sampled(selection, scorer)
        of = (selection, scorer)
        rows = self.made(("selected", of), [rows], lambda: self._selected(rows, selection))
        note = ""
        if text:
            found = self.made(
                ("found", of, text), [rows], lambda: search(self.folder, rows, text, selection.evaluations)
            )
            rows, note = found
        shown = rows.slice(start, stop - start)
        if "reward" not in shown.columns:
            shown = self._judged(shown, scorer)
        return Page(self._told(shown, selection), len(rows), note)

    def _steps(self, dataset: str, selection: Selection) -> list[int] | None:
        """Steps of a data set among those asked for; None: all."""
        if selection.steps is None:
            return None
        known = self.shelf.steps(dataset)
        found = [step for step in known if step in selection.steps]
        if not found:
            has = f"it has {known[0]} to {known[-1]}" if known else "it has none yet"
            raise ConfigError("step", f"{selection.steps.low:g}", f"the run has no such step; {has}")
        return found

    def _sampled(self, selection: Selection, scorer: str | None) -> pl.DataFrame:
        """Rollouts, the last attempt of each, newest step first; with rewards and advantages where they decide."""
        plain = self.shelf.rows("rollouts", [*PLAIN, "attempt"])
        rows: pl.DataFrame = self.made("rollouts", [plain], lambda: _newest_first(plain))
        if not _needs_rewards(selection):
            return rows
        batches = self.shelf.rows("batches", BATCH_COLUMNS)
        scores = self.shelf.rows("scores", SCORE_COLUMNS, scorer=scorer) if scorer else None

        def join() -> pl.DataFrame:
            lazy = None if scores is None else scores.lazy()
            return _newest_first(judged(rows.lazy(), batches.lazy(), lazy).collect())

        joined: pl.DataFrame = self.made(("judged", scorer), [rows, batches, scores], join)
        return joined

    def _held_out(self, selection: Selection) -> pl.DataFrame:
        rows = self.shelf.rows("evaluations", [*PLAIN, "reward", "greedy"])
        rows = rows.with_columns(pl.lit(None, pl.Float32).alias("advantage"))
        return rows.sort(-pl.col("step"), "group", "sample")

    def _selected(self, rows: pl.DataFrame, selection: Selection) -> pl.DataFrame:
        steps = self._steps("evaluations" if selection.evaluations else "rollouts", selection)
        if steps is not None:
            rows = rows.filter(pl.col("step").is_in(steps))
        if selection.group is not None:
            rows = rows.filter(pl.col("group") == selection.group)
        for status in selection.status:
            known_value("status", status, (*STATUSES, UNSCORED))
        if "reward" in rows.columns:
            rows = filtered(rows, selection)
        else:
            if selection.env:
                known_value("env", selection.env, rows["env"].unique())
                rows = rows.filter(pl.col("env") == selection.env)
            if selection.status:
                rows = rows.filter(pl.col("status").is_in(selection.status))
        sort = selection.sort
        if sort.removeprefix("-") == "trajectory":
            return rows.sort("group", "sample", descending=sort.startswith("-"))
        return ordered(rows, COLUMNS, sort, 0)

    def _judged(self, shown: pl.DataFrame, scorer: str | None) -> pl.DataFrame:
        """Rows of one page with their rewards and advantages, of whose steps alone those are read."""
        steps = shown["step"].unique().to_list()

        def of(dataset: str, columns: list[str], **outer: str) -> pl.LazyFrame:
            parts = [self.shelf.rows(dataset, columns, **outer, step=step) for step in steps]
            return pl.concat(parts or [self.shelf.rows(dataset, columns, **outer, step=0)]).lazy()

        scores = of("scores", SCORE_COLUMNS, scorer=scorer) if scorer else None
        order = shown.select("trajectory_id")
        rows = judged(shown.lazy(), of("batches", BATCH_COLUMNS), scores).collect()
        return order.join(rows, on="trajectory_id", how="left", maintain_order="left")

    def _told(self, shown: pl.DataFrame, selection: Selection) -> list[dict[str, Any]]:
        """Rows as a table shows them, with what was said last where few steps are to be read for it."""
        if shown["step"].n_unique() <= MOST_STEPS_READ:
            rows = with_messages(self.folder, shown, is_held_out=selection.evaluations)
            for row in rows:
                row.pop("messages")
        else:
            rows = [{"trajectory": short_id(row["trajectory_id"]), **row} for row in shown.to_dicts()]
        return rows


def _needs_rewards(selection: Selection) -> bool:
    by_reward = ("reward", "advantage", "error")
    return (
        selection.reward is not None
        or UNSCORED in selection.status
        or selection.sort.removeprefix("-") in by_reward
    )


def _newest_first(rows: pl.DataFrame) -> pl.DataFrame:
    if len(rows) and rows["attempt"].max() != 0:
        rows = last_attempts(rows.lazy()).collect()
    return rows.sort(-pl.col("step"), "group", "sample")
