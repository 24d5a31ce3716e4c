"""What `rollmill inspect` shows: a run's data sets, summed up with Polars."""

from collections.abc import Mapping, Sequence

import polars as pl

from flows.looking.ordering import cut_notes, ordered
from flows.looking.selection import Selection, known_value, partitions, scan_partitions
from flows.looking.trajectories import trajectories_view
from flows.looking.view import Column, View, counted, without_alike
from tasks.store.attempts import last_attempts
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.reader import Scan, scan

FULL_REWARD = 1.0
TRAINED = "trained"
"""What stands for the reason why a group is not trained on, where it is."""

STEP_COLUMNS = (
    Column("step"),
    Column("groups", rank=3),
    Column("groups_trained", rank=5, header="trained"),
    Column("survived", rank=4),
    Column("lost", rank=2),
    Column("reward"),
    Column("tokens", rank=1, digits=1),
    Column("seconds", rank=6, digits=1),
)
OF_ALL_ENVIRONMENTS = ("lost", "seconds")
"""Columns of a step that are measured of all its environments together."""
GROUP_COLUMNS = (
    Column("group"),
    Column("step", rank=6),
    Column("env", rank=5),
    Column("expected", rank=4),
    Column("survived", rank=1),
    Column("reward_mean", header="reward"),
    Column("reward_std", rank=2, header="std"),
    Column("tokens_mean", rank=3, header="tokens", digits=1),
    Column("duration_s", rank=7, header="seconds", digits=1),
    Column("reason", is_text=True),
)
VERSION_COLUMNS = (
    Column("step", header="policy version"),
    Column("reward", header="reward, sampled"),
    Column("greedy_accuracy", header="accuracy, greedy"),
)


def view(folder: RunFolder, selection: Selection) -> View:
    """The table that was asked for: trajectories, groups, steps, or held-out rewards by policy version.

    Raises:
        ConfigError: the run has no such step, group, scorer, environment, status or column; names what there is.
    """
    selection.check()
    level = selection.resolved_level
    if level == "trajectories":
        return trajectories_view(folder, selection)
    if selection.evaluations:
        return versions_view(folder, selection)
    return groups_view(folder, selection) if level == "groups" else run_view(folder, selection)


def run_view(folder: RunFolder, selection: Selection | None = None, scan: Scan = scan) -> View:
    """The run by step, and its totals; of an environment without the columns that are measured of all."""
    selection = selection or Selection()
    trains = read_manifest(folder).trains
    metrics = _step_metrics(folder, scan, trains=trains)
    by_status = _counts(folder, selection.env, scan)
    steps = _steps(folder, selection, scan).join(metrics, on="step", how="left", maintain_order="left")
    columns: Sequence[Column] = STEP_COLUMNS
    if selection.env:
        steps = steps.drop(OF_ALL_ENVIRONMENTS)
        columns = [column for column in columns if column.name not in OF_ALL_ENVIRONMENTS]
    shown = _ordered(steps, columns, selection)
    n_done = len(metrics)
    values: dict[str, object] = {
        "run": folder.location,
        "steps": n_done,
        "trajectories": sum(by_status.values()),
        "by_status": by_status,
        "held_out": held_out(folder, selection.env, scan=scan).to_dicts(),
        "policy_version": n_done if trains else 0,
        "by_step": shown,
    }
    counts = ", ".join(f"{n} {status}" for status, n in by_status.items())
    n_sampled = counted(sum(by_status.values()), "trajectory", "trajectories")
    of_env = selection.env and f" of {selection.env}"
    title = f"{folder.location}: {counted(n_done, 'step')} {'trained' if trains else 'collected'}, {n_sampled}{of_env}"
    notes = cut_notes(len(shown), len(steps))
    return View(values, f"{title}{counts and f' ({counts})'}", columns, shown, notes)


def groups_view(folder: RunFolder, selection: Selection) -> View:
    """The groups of some steps, one by one."""
    steps = partitions(folder, "groups", "step", selection.steps)
    groups = selected_groups(folder, selection, steps)
    shown = _ordered(groups, GROUP_COLUMNS, selection)
    return View(
        {"step": steps[0] if steps and len(steps) == 1 else None, "n": len(groups), "groups": shown},
        f"{counted(len(groups), 'group')}{_of_steps(steps)}",
        without_alike(GROUP_COLUMNS, shown, ("step", "env")),
        shown,
        cut_notes(len(shown), len(groups)),
    )


def selected_groups(
    folder: RunFolder, selection: Selection, steps: list[int] | None, scan: Scan = scan
) -> pl.DataFrame:
    """The groups of these steps, None: of all, that are asked for, by step and number.

    Raises:
        ConfigError: the run has no such environment, and no group that such became of; names what there is.
    """
    names = [column.name for column in GROUP_COLUMNS]
    groups = scan_partitions(folder, "groups", [*names, "subgroup"], "step", steps, scan).collect()
    if selection.env:
        known_value("--env", selection.env, groups["env"])
        groups = groups.filter(pl.col("env") == selection.env)
    fate = pl.col("reason").replace("", TRAINED)
    for status in selection.status:
        known_value("--status", status, groups.select(fate)["reason"])
    if selection.status:
        groups = groups.filter(fate.is_in(selection.status))
    if selection.reward:
        groups = groups.filter(pl.col("reward_mean").is_between(selection.reward.low, selection.reward.high))
    if selection.group is not None:
        groups = groups.filter(pl.col("group") == selection.group)
    return groups.sort("step", "group", "subgroup")


def versions_view(folder: RunFolder, selection: Selection) -> View:
    """Held-out rewards by policy version."""
    if selection.env:
        known_value("--env", selection.env, scan(folder, "evaluations", ["env"]).collect()["env"])
    frame = held_out(folder, selection.env)
    if asked := partitions(folder, "evaluations", "version", selection.steps):
        frame = frame.filter(pl.col("step").is_in(asked))
    shown = _ordered(frame, VERSION_COLUMNS, selection)
    title = f"{folder.location}: held out{selection.env and f', {selection.env}'}"
    return View({"held_out": shown}, title, VERSION_COLUMNS, shown, cut_notes(len(shown), len(frame)))


def held_out(folder: RunFolder, env: str = "", version: int | None = None, scan: Scan = scan) -> pl.DataFrame:
    """Each complete evaluation, or that of one version, oldest first, of an environment or of all.

    Columns: step (policy version), reward (sampled), greedy_accuracy.

    A trajectory that could not be scored counts as reward 0; accuracy is the share of full rewards (1).
    """
    sampled, greedy = pl.col("greedy").not_(), pl.col("greedy")
    is_right = pl.col("reward").fill_nan(0.0) >= FULL_REWARD - 1e-9
    n_prompts = read_manifest(folder).config.get("evaluate", {}).get("n_prompts", 0)
    partition = {} if version is None else {"version": version}
    return (
        scan(folder, "evaluations", ["policy_version", "env", "greedy", "reward"], **partition)
        .with_columns(pl.len().over("policy_version").alias("n"))
        .filter((pl.col("n") == 2 * n_prompts) & (pl.lit(not env) | (pl.col("env") == env)))
        .group_by(pl.col("policy_version").cast(pl.Int64).alias("step"))
        .agg(
            pl.col("reward").filter(sampled).fill_nan(0.0).mean().alias("reward"),
            is_right.filter(greedy).mean().alias("greedy_accuracy"),
        )
        .sort("step")
        .collect()
    )


def _steps(folder: RunFolder, selection: Selection, scan: Scan) -> pl.DataFrame:
    steps = partitions(folder, "groups", "step", selection.steps)
    columns = ["step", "group", "env", "survived", "reward_mean", "tokens_mean", "reason"]
    groups = scan_partitions(folder, "groups", columns, "step", steps, scan).collect()
    if selection.env:
        known_value("--env", selection.env, groups["env"])
        groups = groups.filter(pl.col("env") == selection.env)
    return (
        groups.group_by("step")
        .agg(
            pl.col("group").n_unique().alias("groups"),
            pl.col("survived").sum(),
            pl.col("reward_mean").drop_nans().mean().alias("reward"),
            pl.col("tokens_mean").drop_nans().mean().alias("tokens"),
            pl.col("group").filter(pl.col("reason") == "").n_unique().alias("groups_trained"),
        )
        .sort("step")
    )


def _step_metrics(folder: RunFolder, scan: Scan, *, trains: bool) -> pl.DataFrame:
    """Of each step that is done: trajectories lost, and its seconds."""
    wanted = {"lost": "drops/trajectories", "seconds": "time/step_s"}
    value = pl.col("value").filter
    return (
        scan(folder, "metrics", ["step", "name", "value"])
        .group_by("step")
        .agg(
            (pl.col("name") == ("train/updated" if trains else wanted["seconds"])).any().alias("done"),
            *(value(pl.col("name") == name).last().alias(short) for short, name in wanted.items()),
        )
        .filter("done")
        .drop("done")
        .with_columns(pl.col("lost").cast(pl.Int64))
        .collect()
    )


def _counts(folder: RunFolder, env: str, scan: Scan) -> dict[str, int]:
    """Trajectories by status of their last attempt, of an environment or of all."""
    rows = scan(folder, "rollouts", ["group", "sample", "attempt", "status", "env"])
    rows = last_attempts(rows).filter(pl.lit(not env) | (pl.col("env") == env))
    by_status = rows.group_by("status").len().sort("status").collect()
    return {str(status): int(n) for status, n in by_status.rows()}


def _ordered(
    frame: pl.DataFrame, columns: Sequence[Column], selection: Selection
) -> Sequence[Mapping[str, object]]:
    """The rows in the order asked for, as many as asked for."""
    return ordered(frame, columns, selection.sort, selection.limit or 0).to_dicts()


def _of_steps(steps: list[int] | None) -> str:
    if steps is None:
        return ""
    return f" of step {steps[0]}" if len(steps) == 1 else f" of steps {steps[0]} to {steps[-1]}"
