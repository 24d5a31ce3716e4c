"""Which trajectories of a step are worth reading: its best, its worst, and one that failed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from tasks.store.attempts import last_attempts, short_id
from tasks.store.layout import RunFolder
from tasks.store.reader import read_trajectories, scan


@dataclass(frozen=True, slots=True)
class Reading:
    """A trajectory to read, and why.

    Attributes:
        why: best, worst or failed.
        short: its id without the run's.
        row: env, status, reward (None without one), error_type, error of the rollout or of its score.
        messages: the conversation.
    """

    why: str
    short: str
    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]


def choose(folder: RunFolder, step: int, scorer: str) -> list[Reading]:
    """The trajectories of a step to read, at most three.

    The best and the worst by reward; of several, one of the group whose rewards differ most, so that both are answers
    to one problem where that can be. Of what failed, one with the most frequent error.
    """
    rows = _rows(folder, step, scorer)
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
        Reading(why, short_id(row["trajectory_id"]), row, json.loads(said))
        for (why, row), said in zip(chosen.items(), messages, strict=True)
    ]


def _rows(folder: RunFolder, step: int, scorer: str) -> pl.DataFrame:
    """The step's trajectories, the last attempt of each, with reward, spread of their group, and error."""
    names = ["trajectory_id", "group", "sample", "attempt", "env", "status", "error_type", "error"]
    rollouts = last_attempts(scan(folder, "rollouts", names, step=step))
    of_score = ["trajectory_id", "reward", "error_type", "error"]
    scores = scan(folder, "scores", of_score, scorer=scorer, step=step).select(
        "trajectory_id",
        pl.col("reward").cast(pl.Float64).fill_nan(None),
        pl.col("error_type").alias("score_error_type"),
        pl.col("error").alias("score_error"),
    )
    spread = (
        scan(folder, "groups", ["group", "reward_std"], step=step)
        .group_by("group")
        .agg(pl.col("reward_std").cast(pl.Float64).fill_nan(None).max())
    )
    is_rollouts = pl.col("error_type") != ""
    return (
        rollouts.join(scores, on="trajectory_id", how="left")
        .join(spread, on="group", how="left")
        .with_columns(
            pl.when(is_rollouts).then("error_type").otherwise(pl.col("score_error_type").fill_null("")),
            pl.when(is_rollouts).then("error").otherwise(pl.col("score_error").fill_null("")).alias("error"),
        )
        .collect()
    )
