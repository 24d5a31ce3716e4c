"""Choose the trajectories of a step that are worth reading: the best, the worst, and a failed one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from rollmill.tasks.look.tables.trajectory_table import BATCH_COLUMNS, SCORE_COLUMNS, join_rewards
from rollmill.tasks.store.attempts import last_attempts, short_id
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read_trajectories, scan


@dataclass(frozen=True, slots=True)
class NotableTrajectory:
    """A trajectory of a step that is worth reading, and the reason `why`: it is the best, the worst or a failed one.

    `short` is its id without the run's; `row` has env, status, reward (None without one), error_type and error of rollout or score.
    """

    why: str
    short: str
    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]


def choose_notable(folder: RunFolder, step: int, scorer: str) -> list[NotableTrajectory]:
    """Choose at most three trajectories of a step that are worth reading: the best, the worst and a failed one.

    The best and the worst by reward come from the group with the largest reward spread, so that both answer the same prompt if
    possible. The failed one has the most frequent error.
    """
    rows = _read_step(folder, step, scorer)
    chosen: dict[str, dict[str, Any]] = {}
    scored = rows.filter(pl.col("reward").is_not_null())
    order = ["reward", "reward_std", "group", "sample"]
    if len(scored):
        best = scored.sort(order, descending=[True, True, False, False], nulls_last=True).row(0, named=True)
        is_other = pl.col("group") != best["group"]
        worst = scored.sort(
            "reward", is_other, *order[1:], descending=[False, False, True, False, False], nulls_last=True
        ).row(0, named=True)
        chosen["best"] = best
        if worst["reward"] < best["reward"]:
            chosen["worst"] = worst
    failed = rows.filter(pl.col("error_type") != "").with_columns(
        pl.len().over("error_type").alias("n_alike")
    )
    if len(failed):
        chosen["failed"] = failed.sort(["n_alike", "group", "sample"], descending=[True, False, False]).row(
            0, named=True
        )
    ids = [row["trajectory_id"] for row in chosen.values()]
    messages = read_trajectories(folder, step, ids, ["messages"])["messages"].to_pylist() if ids else []
    return [
        NotableTrajectory(why, short_id(row["trajectory_id"]), row, json.loads(said))
        for (why, row), said in zip(chosen.items(), messages, strict=True)
    ]


def _read_step(folder: RunFolder, step: int, scorer: str) -> pl.DataFrame:
    """Read a step's trajectories, last attempts only, with reward, error and the standard deviation of the group's rewards."""
    names = ["trajectory_id", "group", "sample", "attempt", "env", "status", "error_type", "error"]
    rollouts = last_attempts(scan(folder, "rollouts", names, step=step))
    scores = scan(folder, "scores", SCORE_COLUMNS, scorer=scorer, step=step)
    batches = scan(folder, "batches", BATCH_COLUMNS, step=step)
    spread = (
        scan(folder, "groups", ["group", "reward_std"], step=step)
        .group_by("group")
        .agg(pl.col("reward_std").cast(pl.Float64).fill_nan(None).max())
    )
    found = join_rewards(rollouts, batches, scores).join(spread, on="group", how="left")
    return found.with_columns(pl.col("reward").cast(pl.Float64).fill_nan(None)).collect()
