"""Stored runs as lazy Polars frames and as SQL views: one run or several, on a disk or on S3."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.ledger.run_ledger import read_ledger
from rollmill.tasks.look.ledger.step_attribution import Ledger
from rollmill.tasks.look.tables.costs import SCHEMA as COST_SCHEMA
from rollmill.tasks.look.tables.costs import measure_costs
from rollmill.tasks.look.tables.dataset_scans import scan_dataset
from rollmill.tasks.look.tables.joined_trajectories import scan_trajectories
from rollmill.tasks.look.tables.sql_query import (
    ORDER_EXAMPLE,
    WEIGHT_EXAMPLE,
    check_condition,
    check_weight,
    refuse_changing,
    run_query,
)
from rollmill.tasks.look.tables.view import Column, View, count_noun, limit_notes
from rollmill.tasks.store.folders import PartitionValue, RunFolder
from rollmill.tasks.store.reader import list_scorers, list_steps
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.run_search import distinct_runs
from rollmill.tasks.store.schemas import SCHEMAS

TRAJECTORIES, COSTS = "trajectories", "costs"
VIEWS = (TRAJECTORIES, COSTS, *sorted(SCHEMAS))
"""Names that a query may read from: the joined trajectories, what they cost, and each data set as it is stored."""

GROUP_COLUMNS: Mapping[str, str] = {
    "env": "any_value(env)",
    "example_id": "any_value(example_id)",
    "n": "count(*)",
    "n_scored": "count(reward)",
    "reward": "avg(reward)",
    "reward_std": "stddev_pop(reward)",
    "reward_min": "min(reward)",
    "reward_max": "max(reward)",
    "tokens": "avg(n_completion_tokens)",
    "versions_behind": "step - min(policy_version_first) filter (policy_version_first >= 0)",
}
"""Columns of a group, besides run, step and group, with the aggregate of its trajectories that each is."""
_KEYS = 'location, run, step, "group"'
# A missing reward is stored as NaN, which SQL sorts above every number.
_HELD_OUT = "(select * replace (case when not isnan(reward) then reward end as reward) from evaluations)"
# True if the version that sampled each scored trajectory is known: then its log-probabilities are.
_IS_SAMPLED = "coalesce(bool_and(policy_version_first >= 0) filter (reward is not null), true) as is_sampled"


class RunFrames:
    """The rows of stored runs. Frames are lazy: `.collect()` reads the columns that the query needs.

    The column `location` names the folder of the run that has a row.

    Example:
        >>> runs = rollmill.open_run("runs/quickstart", "s3://bucket/runs/other")
        >>> trained = runs.trajectories.filter(pl.col("advantage").is_not_null())
        >>> by_prompt = trained.group_by("example_id").agg(pl.col("reward").mean()).collect()

    Attributes:
        folders: the runs, in the order given; each once.
    """

    def __init__(self, folders: Sequence[RunFolder], scorer: str = "", step: int | None = None) -> None:
        """Open runs for reading.

        Args:
            folders: at least one run.
            scorer: NAME@VERSION of the rewards in `trajectories`; empty: the scorer that each run trains on.
            step: the only step whose rows `trajectories` has; None: all steps.

        Raises:
            ConfigError: no run has scores of this scorer.
        """
        self.folders, self._scorer = tuple(distinct_runs(folders)), scorer
        self._of_step: Mapping[str, PartitionValue] = {} if step is None else {"step": step}
        if scorer and not any(scorer in list_scorers(folder) for folder in folders):
            known = sorted({each for folder in folders for each in list_scorers(folder)})
            raise ConfigError("scorer", scorer, f"the runs have scores of {', '.join(known) or 'no scorer'}")

    @property
    def trajectories(self) -> pl.LazyFrame:
        """One row per trajectory: the columns of `rollouts` for its last attempt, and what scoring and the batch made of it.

        Columns besides those of rollouts:
            location: folder of the run.
            reward: null unless scored.
            score_status: scored, failed or dropped; null without a score.
            subgroup: part of the group that the reward is compared with; null without a score.
            advantage: null unless it is in the batch of the step that sampled it.
            group_reason: why its group is not in the batch; empty if it is, null if the step has not ended.
        """
        return pl.concat([scan_trajectories(folder, self._scorer, self._of_step) for folder in self.folders])

    @property
    def costs(self) -> pl.LazyFrame:
        """What each trajectory cost, in seconds of servers, ranks and scorers, and what no trajectory used; see `measure_costs`.

        The sums of server_s and trainer_s are the seconds of the run's finished steps times the number of servers, and of ranks. A run
        without spans has no rows.
        """
        schema = {"location": pl.String(), **COST_SCHEMA}
        found = [
            self.measure_costs(folder, read_ledger(folder))
            for folder in self.folders
            if list_steps(folder, "spans")
        ]
        return pl.concat([pl.DataFrame(schema=schema), *found]).lazy()

    def measure_costs(self, folder: RunFolder, ledger: Ledger) -> pl.DataFrame:
        """Return what trajectories cost in the steps of a ledger, which is of this run."""
        names = ("rollouts", "batches", "evaluations")
        rollouts, batches, evaluations = (scan_dataset(folder, name, {}) for name in names)
        costs = measure_costs(
            ledger, rollouts, scan_trajectories(folder, self._scorer, {}), batches, evaluations
        )
        return costs.select(pl.lit(folder.location).alias("location"), pl.all())

    def dataset(self, name: str, **partition: PartitionValue) -> pl.LazyFrame:
        """Return the rows of a data set as they are stored, or of some of its partitions; zero rows if nothing is.

        `scorer` is NAME@VERSION. Of `states`, name one environment.

        Example: runs.dataset("scores", scorer="addition@1")

        Raises:
            SchemaError: unknown data set or partition.
        """
        return pl.concat([scan_dataset(folder, name, partition) for folder in self.folders])

    def list_groups(self) -> pl.DataFrame:
        """Return the groups of `trajectories`: location, run, step, group, the columns of GROUP_COLUMNS, and is_sampled.

        `is_sampled` is False if a scored trajectory of the group was imported.
        """
        query = f"{self._select_groups(_IS_SAMPLED)} order by all"
        return self._run("QUERY", query, query, reads_files=False)

    def find_groups(self, field: str, condition: str) -> dict[int, set[int]]:
        """Return the groups that meet a condition in SQL, by step; `field` names the condition in an error.

        The condition cannot read files. It has the columns of GROUP_COLUMNS.

        Raises:
            ConfigError: it is no condition on these columns, or calls a function whose value changes from query to query.
        """
        refuse_changing(field, condition)
        query = f'select step, "group" from ({self._select_groups()}) where ({condition}\n)'
        found: dict[int, set[int]] = {}
        for step, group in self._run(field, condition, query, reads_files=False).iter_rows():
            found.setdefault(step, set()).add(group)
        return found

    def find_trajectories(
        self, field: str, condition: str, longest_s: float, *, evaluations: bool = False
    ) -> pl.Series:
        """Return the ids of the trajectories that meet a condition in SQL; `field` names the condition in an error.

        The condition has the columns of the view `trajectories`, or with `evaluations` those of that data set, where a missing
        reward is null. It may ask all views, and cannot read files. After `longest_s` seconds it is ended.

        Raises:
            ConfigError: it is no condition on these columns, or exceeds a limit; the remedy is one line.
        """
        query = (
            f"select trajectory_id from {_HELD_OUT if evaluations else TRAJECTORIES} where ({condition}\n)"
        )
        try:
            check_condition(field, condition)
            found = self._run(field, condition, query, reads_files=False, longest_s=longest_s)
        except ConfigError as error:
            # DuckDB adds the line of the query, with an arrow below it.
            remedy = " ".join(error.remedy.partition("\n\nLINE ")[0].split())
            raise ConfigError(field, condition, remedy) from error
        if found.schema != {"trajectory_id": pl.String()}:
            raise ConfigError(field, condition, "give one condition, such as reward > 0.5")
        return found["trajectory_id"]

    def order_groups(self, field: str, keys: str) -> dict[tuple[str, int, int], int]:
        """Return the place of each group, by location of its run, step and group, in the order of keys in SQL, as after `order by`.

        Arguments and errors are those of `find_groups`. Groups with equal keys are in the order of location, step and group.
        """
        refuse_changing(field, keys, ORDER_EXAMPLE)
        query = f'select location, step, "group" from ({self._select_groups()}) order by {keys}\n, location, step, "group"'
        rows = self._run(field, keys, query, reads_files=False).iter_rows()
        return {(location, step, group): place for place, (location, step, group) in enumerate(rows)}

    def weigh_groups(self, field: str, weight: str) -> dict[tuple[str, int, int], float]:
        """Return a number in SQL for each group, by location of its run, step and group.

        Arguments and errors are those of `find_groups`.

        Raises:
            ConfigError: also for a number that is negative, infinite or missing.
        """
        refuse_changing(field, weight, WEIGHT_EXAMPLE)
        query = f'select location, step, "group", ({weight}\n)::double from ({self._select_groups()}) order by all'
        found: dict[tuple[str, int, int], float] = {}
        rows = self._run(field, weight, query, reads_files=False)
        if rows.width != 4:
            raise ConfigError(field, weight, "give one number")
        for location, step, group, value in rows.iter_rows():
            of = f"group {group} of step {step} of {location}"
            found[location, step, group] = check_weight(field, weight, value, of)
        return found

    def _select_groups(self, *more: str) -> str:
        """Return the query for the groups of `trajectories`, with the columns of GROUP_COLUMNS and more."""
        values = dict(GROUP_COLUMNS)
        collected = [folder.location for folder in self.folders if not read_manifest(folder).trains]
        if collected:
            # Steps of a run that trains nothing are no policy versions.
            names = ", ".join("'{}'".format(each.replace("'", "''")) for each in collected)
            values["versions_behind"] = f"({values['versions_behind']}) * (location not in ({names}))::int"
        columns = ", ".join([_KEYS, *(f"{each} as {name}" for name, each in values.items()), *more])
        return f"select {columns} from {TRAJECTORIES} group by {_KEYS}"

    def sql(self, query: str, *, reads_files: bool = True) -> pl.DataFrame:
        """Run a query of DuckDB over the views `trajectories` and one for each data set but `states`.

        `group` and `order` are words of SQL: write "group" and "order" for these columns. With `reads_files` False the query
        can neither read nor write a file.

        Example: runs.sql('select step, avg(reward) from trajectories group by step order by step')

        Raises:
            ConfigError: the query is wrong, or reads from a view that does not exist.
        """
        return self._run("QUERY", query, query, reads_files=reads_files)

    def _run(
        self,
        field: str,
        given: str,
        query: str,
        *,
        reads_files: bool = True,
        longest_s: float | None = None,
    ) -> pl.DataFrame:
        """Run a query; an error names `field` and its value `given`."""
        views: dict[str, Callable[[], pl.LazyFrame]] = {
            name: partial(self.dataset, name) for name in sorted(SCHEMAS)
        }
        joined = {TRAJECTORIES: lambda: self.trajectories, COSTS: lambda: self.costs}
        every = {**joined, **views}
        return run_query(field, given, query, every, reads_files=reads_files, longest_s=longest_s)


def view_result(found: pl.DataFrame, limit: int) -> View:
    """Return a table of the first `limit` rows of a query's result; 0: all. It has no JSON values: these would be many rows."""
    shown = found.head(limit or len(found))
    columns = [
        Column(name, is_text=kind == pl.String or kind.is_nested()) for name, kind in found.schema.items()
    ]
    return View(
        {},
        count_noun(len(found), "row"),
        columns,
        shown.to_dicts(),
        limit_notes(len(shown), len(found), "none") if found.columns and len(found) else (),
    )
