"""The trajectories of a run, each with what scoring and its batch made of it, as a lazy Polars frame."""

from collections.abc import Iterator, Mapping

import polars as pl
from polars.io.plugins import register_io_source

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.dataset_scans import finish_scan, scan_dataset
from rollmill.tasks.look.tables.scores import list_scorers_by_step, resolve_scorer
from rollmill.tasks.store.attempts import last_attempts
from rollmill.tasks.store.folders import PartitionValue, RunFolder
from rollmill.tasks.store.stored_batch import select_own_rows

# Columns of `trajectories` by the data set that has them, besides those of rollouts.
_JOINED: dict[str, dict[str, pl.DataType]] = {
    "scores": {"reward": pl.Float64(), "score_status": pl.String(), "subgroup": pl.Int32()},
    "batches": {"advantage": pl.Float32()},
    "groups": {"group_reason": pl.String()},
}
_KEY = {"trajectory_id", "group", "sample", "attempt"}


def scan_trajectories(folder: RunFolder, given: str, of_step: Mapping[str, PartitionValue]) -> pl.LazyFrame:
    """Return the joined trajectories of a run; only the data sets that a query's columns need are read.

    Args:
        folder: of the run.
        given: NAME@VERSION of the rewards; empty: the scorer that the run trains on.
        of_step: the partition of the rows to read; empty: all.
    """
    rollouts = scan_dataset(folder, "rollouts", of_step)
    scorer = given or resolve_scorer(folder)
    schema = rollouts.collect_schema()
    joined = {name: kind for columns in _JOINED.values() for name, kind in columns.items()}

    def read(
        names: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        names = [*schema, *joined] if names is None else names
        needed = {*names, *(predicate.meta.root_names() if predicate is not None else ())}
        asked = {dataset for dataset, columns in _JOINED.items() if needed & {*columns}}
        own = rollouts.select(name for name in schema if name in needed | _KEY)
        # Groups are those of the scorer that the run trains on, and only that one's subgroups are theirs.
        trained = _find_trained_scorer(folder, scorer) if given and "groups" in asked else scorer
        found = _join(own, _scan_joined(folder, scorer, trained, asked, of_step, is_default=not given))
        yield finish_scan(found.lazy(), names, predicate, n_rows)

    return register_io_source(read, schema=pl.Schema({**schema, **joined}))


def _scan_joined(
    folder: RunFolder,
    scorer: str | None,
    trained: str | None,
    asked: set[str],
    of_step: Mapping[str, PartitionValue],
    *,
    is_default: bool,
) -> dict[str, pl.LazyFrame]:
    """Return what is joined to the rollouts, by the data set; `subgroups` are those of `groups`, if `scores` has others."""
    found: dict[str, pl.LazyFrame] = {}
    if "scores" in asked or ("groups" in asked and trained == scorer):
        columns = (pl.col("reward").fill_nan(None), pl.col("status").alias("score_status"), "subgroup")
        scan = _scan_trained_scores if is_default else _scan_scores
        found["scores"] = scan(folder, scorer, of_step).select("trajectory_id", *columns)
    if "batches" in asked:
        own = select_own_rows(scan_dataset(folder, "batches", of_step))
        found["batches"] = own.select("trajectory_id", "advantage")
    if "groups" in asked:
        groups = scan_dataset(folder, "groups", of_step)
        found["groups"] = groups.select("group", "subgroup", pl.col("reason").alias("group_reason"))
        if trained != scorer:
            scores = _scan_scores(folder, trained, of_step)
            found["subgroups"] = scores.select("trajectory_id", pl.col("subgroup").alias("_subgroup"))
    return found


def _scan_scores(
    folder: RunFolder, scorer: str | None, of_step: Mapping[str, PartitionValue]
) -> pl.LazyFrame:
    return scan_dataset(folder, "scores", {**({"scorer": scorer} if scorer else {}), **of_step})


def _scan_trained_scores(
    folder: RunFolder, scorer: str | None, of_step: Mapping[str, PartitionValue]
) -> pl.LazyFrame:
    """Return the scores that each step is trained on: in a fork the copied steps may have another scorer than `scorer`, its own."""
    by_step = list_scorers_by_step(folder, scorer) if scorer else []
    if len({key for key, _ in by_step}) < 2:
        return _scan_scores(folder, scorer, of_step)
    return pl.concat(
        _scan_scores(folder, key, of_step).filter(
            pl.col("step").is_between(steps.start, steps.stop, closed="left")
        )
        for key, steps in by_step
    )


def _find_trained_scorer(folder: RunFolder, chosen: str | None) -> str | None:
    """Return the scorer that the run trains on; the chosen one if the run does not name it."""
    try:
        return resolve_scorer(folder) or chosen
    except ConfigError:
        return chosen


def _join(rollouts: pl.LazyFrame, others: Mapping[str, pl.LazyFrame]) -> pl.DataFrame:
    """Join rollouts, last attempts only, with what `_scan_joined` gives; one without a score is of its group's first subgroup."""
    # Joins of one piece a column are quicker than of one piece a shard.
    found, *tables = (each.rechunk() for each in pl.collect_all([rollouts, *others.values()]))
    rows = dict(zip(others, tables, strict=True))
    # Nearly all runs have one attempt at each trajectory, and to group a million rows for that takes long.
    if len(found) and found["attempt"].max() != 0:
        found = last_attempts(found.lazy()).collect()
    for name in ("scores", "batches", "subgroups"):
        if name in rows:
            found = found.join(rows[name], on="trajectory_id", how="left", maintain_order="left")
    if "groups" in rows:
        of_row = pl.col("_subgroup" if "subgroups" in rows else "subgroup").fill_null(0).alias("_subgroup")
        found = found.with_columns(of_row)
        if rows["groups"]["subgroup"].max():
            first = rows["groups"].group_by("group").agg(pl.col("subgroup").min().alias("_first"))
            found = found.join(first, on="group", how="left", maintain_order="left")
            found = found.with_columns(pl.max_horizontal("_subgroup", "_first").alias("_subgroup"))
        found = found.join(
            rows["groups"],
            left_on=["group", "_subgroup"],
            right_on=["group", "subgroup"],
            how="left",
            coalesce=True,
            maintain_order="left",
        )
    return found
