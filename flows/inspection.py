"""What `rollmill inspect` shows: a run's data sets, summed up with Polars."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl
from rich.table import Table

from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.reader import scan

FULL_REWARD = 1.0


@dataclass(frozen=True, slots=True)
class View:
    """One table of a run: its JSON form, and its form for a terminal."""

    values: dict[str, object]
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def table(self) -> Table:
        """The rows for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*self.cells(row))
        return table

    @staticmethod
    def cells(row: Sequence[object]) -> list[str]:
        """A row's values as a person reads them."""
        return [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row]


def view(folder: RunFolder, *, step: int | None = None, group: int | None = None) -> View:
    """The table that was asked for: a group's trajectories, a step's groups, or the run's steps."""
    if group is not None:
        return group_view(folder, group)
    return run_view(folder) if step is None else step_view(folder, step)


def run_view(folder: RunFolder) -> View:
    """The run by step, and its totals."""
    steps = _steps(folder)
    by_status = _counts(folder)
    values: dict[str, object] = {
        "run": folder.location,
        "steps": _n_trained(folder),
        "trajectories": sum(by_status.values()),
        "by_status": by_status,
        "held_out": held_out(folder),
        "policy_version": _n_trained(folder),
        "by_step": steps.to_dicts(),
    }
    return View(
        values, f"{folder.location}: {values['trajectories']} trajectories", steps.columns, steps.rows()
    )


def step_view(folder: RunFolder, step: int) -> View:
    """The groups of a step, one by one."""
    groups = (
        scan(folder, "groups")
        .filter(pl.col("step") == step)
        .select("group", "env", "expected", "survived", "reward_mean", "reward_std", "tokens_mean", "reason")
        .sort("group")
        .collect()
    )
    return View({"step": step, "groups": groups.to_dicts()}, f"step {step}", groups.columns, groups.rows())


def group_view(folder: RunFolder, group: int) -> View:
    """The trajectories of a group, one by one."""
    scores = scan(folder, "scores", ["trajectory_id", "reward"])
    rollouts = (
        scan(folder, "rollouts")
        .filter(pl.col("group") == group)
        .join(scores, on="trajectory_id", how="left")
        .sort("sample")
        .select(
            "trajectory_id",
            "status",
            "reward",
            "n_completion_tokens",
            "policy_version_last",
            "messages",
            "error",
        )
        .collect()
    )
    shown = rollouts.with_columns(
        pl.col("messages").map_elements(_last_message, return_dtype=pl.String).alias("answer")
    ).select("trajectory_id", "status", "reward", "n_completion_tokens", "answer", "error")
    return View(
        {"group": group, "trajectories": rollouts.to_dicts()}, f"group {group}", shown.columns, shown.rows()
    )


def _last_message(messages: str) -> str:
    turns = json.loads(messages)
    return str(turns[-1]["content"]) if turns else ""


def held_out(folder: RunFolder) -> list[dict[str, object]]:
    """Each complete evaluation, oldest first: {step: policy version, reward: sampled, greedy_accuracy}.

    A trajectory that could not be scored counts as reward 0; accuracy is the share of full rewards (1).
    """
    sampled, greedy = pl.col("greedy").not_(), pl.col("greedy")
    is_right = pl.col("reward").fill_nan(0.0) >= FULL_REWARD - 1e-9
    evaluations = (
        scan(folder, "evaluations", ["policy_version", "greedy", "reward"])
        .group_by(pl.col("policy_version").alias("step"))
        .agg(
            pl.col("reward").filter(sampled).fill_nan(0.0).mean().alias("reward"),
            is_right.filter(greedy).mean().alias("greedy_accuracy"),
            pl.len().alias("n"),
        )
        .filter(pl.col("n") == 2 * _n_held_out(folder))
        .drop("n")
        .sort("step")
        .collect()
    )
    return evaluations.to_dicts()


def _n_held_out(folder: RunFolder) -> int:
    return int(read_manifest(folder).config["evaluate"]["n_prompts"])


def _steps(folder: RunFolder) -> pl.DataFrame:
    groups = (
        scan(folder, "groups")
        .group_by("step")
        .agg(
            pl.len().alias("groups"),
            pl.col("survived").sum().alias("trajectories"),
            pl.col("reward_mean").drop_nans().mean().alias("reward"),
            pl.col("tokens_mean").drop_nans().mean().alias("tokens"),
            (pl.col("reason") == "").sum().alias("groups_trained"),
        )
        .sort("step")
    )
    return groups.collect()


def _counts(folder: RunFolder) -> dict[str, int]:
    counted = scan(folder, "rollouts", ["status"]).group_by("status").len().sort("status").collect()
    return {str(status): int(n) for status, n in counted.rows()}


def _n_trained(folder: RunFolder) -> int:
    trained = (
        scan(folder, "metrics", ["step", "name"])
        .filter(pl.col("name") == "train/updated")
        .select("step")
        .unique()
        .collect()
    )
    return len(trained)
