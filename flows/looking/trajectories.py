"""A run's trajectories, one by one: what `rollmill inspect` shows of them."""

import json
from typing import Any

import polars as pl

from flows.looking.ordering import cut_notes, ordered
from flows.looking.scored import scorer_of
from flows.looking.selection import Selection, known_value, partitions, scan_partitions
from flows.looking.view import Column, View, counted, without_alike
from tasks.errors import ConfigError
from tasks.store.attempts import last_attempts, short_id
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.partitions import stored_steps
from tasks.store.reader import read, read_trajectories

STATUSES = ("complete", "truncated", "failed", "cancelled")
UNSCORED = "unscored"
"""What a trajectory is called, beside its status, whose score failed or is not there."""
SHOWN_ROWS = 100
"""Most rows of a table for a terminal, unless a limit is given."""

COLUMNS = (
    Column("trajectory"),
    Column("step", rank=7),
    Column("env", rank=8),
    Column("status", rank=2),
    Column("reward"),
    Column("advantage", rank=3),
    Column("n_completion_tokens", rank=4, header="tokens"),
    Column("policy_version_last", rank=6, header="version", absent=-1),
    Column("duration_s", rank=5, header="seconds", digits=2),
    Column("answer", rank=1, is_text=True),
    Column("error", rank=9, is_text=True),
)
PLAIN = (
    "trajectory_id",
    "step",
    "group",
    "sample",
    "env",
    "status",
    "n_completion_tokens",
    "policy_version_first",
    "policy_version_last",
    "duration_s",
    "error_type",
    "error",
)
"""Columns of rollouts that a table of them needs, and that are small."""
SCORE_COLUMNS = ["trajectory_id", "reward", "error_type", "error"]
BATCH_COLUMNS = ["trajectory_id", "advantage"]


def trajectories_view(folder: RunFolder, selection: Selection) -> View:
    """The trajectories that were asked for, each with its reward, its advantage and its last message.

    Raises:
        ConfigError: the run has no such step, group, scorer, environment, status or column; names what there is.
    """
    found, scorer = _evaluated(folder, selection) if selection.evaluations else _sampled(folder, selection)
    found = filtered(found, selection)
    limit = SHOWN_ROWS if selection.limit is None else selection.limit
    chosen = ordered(found, COLUMNS, selection.sort, limit)
    rows = with_messages(folder, chosen, is_held_out=selection.evaluations)
    values = {"group": selection.group, "scorer": scorer, "n": len(found), "trajectories": rows}
    kind = "held-out " if selection.evaluations else ""
    n = counted(len(found), f"{kind}trajectory", f"{kind}trajectories")
    title = f"{n}{scorer and f', rewards by {scorer}'}"
    notes = cut_notes(len(rows), len(found))
    return View(
        values, title, without_alike(COLUMNS, rows, ("step", "env"), ("error", "advantage")), rows, notes
    )


def step_of_group(folder: RunFolder, group: int) -> int:
    """The step whose plan has a group.

    Raises:
        ConfigError: no plan has it; names the groups that there are.
    """
    plans = read(folder, "plans", ["step", "first_group", "n_groups"]).to_pylist()
    for plan in plans:
        if plan["first_group"] <= group < plan["first_group"] + plan["n_groups"]:
            return int(plan["step"])
    raise ConfigError("--group", group, f"the run has no such group; {groups_there_are(folder)}")


def groups_there_are(folder: RunFolder) -> str:
    """The groups that a run has planned, in words."""
    plans = read(folder, "plans", ["first_group", "n_groups"]).to_pylist()
    last = max((plan["first_group"] + plan["n_groups"] for plan in plans), default=0) - 1
    has_gaps = sum(plan["n_groups"] for plan in plans) <= last
    gaps = ", without the numbers of refills that no step took" if has_gaps else ""
    return f"it has groups 0 to {last}{gaps}" if plans else "it has no groups yet"


def check_sampled(folder: RunFolder) -> None:
    """ConfigError for a run that sampled nothing itself, since it was trained from what others had sampled; names these."""
    sources = [source.folder for source in read_manifest(folder).sources]
    if sources and not stored_steps(folder, "plans"):
        remedy = (
            f"it was trained from trajectories that others have sampled; they lie in {', '.join(sources)}"
        )
        raise ConfigError("RUN", folder.location, remedy)


def _sampled(folder: RunFolder, selection: Selection) -> tuple[pl.DataFrame, str]:
    """Rollouts, the last attempt of each, with rewards and advantages, and the scorer."""
    check_sampled(folder)
    if selection.group is not None:
        steps: list[int] | None = [step_of_group(folder, selection.group)]
    else:
        steps = partitions(folder, "rollouts", "step", selection.steps)
    scorer = scorer_of(folder, selection.scorer)
    rollouts = last_attempts(scan_partitions(folder, "rollouts", [*PLAIN, "attempt"], "step", steps))
    if selection.group is not None:
        rollouts = rollouts.filter(pl.col("group") == selection.group)
    batches = scan_partitions(folder, "batches", BATCH_COLUMNS, "step", steps)
    scores = None
    if scorer:
        scores = scan_partitions(folder, "scores", SCORE_COLUMNS, "step", steps, scorer=scorer)
    found = judged(rollouts, batches, scores)
    return found.sort("step", "group", "sample", "trajectory_id").collect(), scorer or ""


def judged(rollouts: pl.LazyFrame, batches: pl.LazyFrame, scores: pl.LazyFrame | None) -> pl.LazyFrame:
    """Rollouts with their advantages, their rewards, and the errors of their scores; without scores no rewards."""
    found = rollouts.join(batches.unique("trajectory_id"), on="trajectory_id", how="left")
    if scores is None:
        return found.with_columns(pl.lit(None, pl.Float64).alias("reward"))
    found = found.join(scores.unique("trajectory_id"), on="trajectory_id", how="left", suffix="_of_score")
    return found.with_columns(
        pl.when(pl.col(name) == "").then(pl.col(f"{name}_of_score")).otherwise(name).fill_null("").alias(name)
        for name in ("error_type", "error")
    ).drop("error_type_of_score", "error_of_score")


def _evaluated(folder: RunFolder, selection: Selection) -> tuple[pl.DataFrame, str]:
    """Held-out trajectories with rewards; a step is the policy version."""
    versions = partitions(folder, "evaluations", "version", selection.steps)
    names = [*PLAIN, "reward", "greedy"]
    found = scan_partitions(folder, "evaluations", names, "version", versions)
    if selection.group is not None:
        found = found.filter(pl.col("group") == selection.group)
    found = found.with_columns(pl.lit(None, pl.Float32).alias("advantage"))
    return found.sort("step", "group", "sample").collect(), ""


def filtered(found: pl.DataFrame, selection: Selection) -> pl.DataFrame:
    """What environment, status and reward leave; ConfigError for one that the run does not have."""
    if selection.env:
        known_value("--env", selection.env, found["env"])
        found = found.filter(pl.col("env") == selection.env)
    for status in selection.status:
        known_value("--status", status, (*STATUSES, UNSCORED))
    if selection.status:
        unscored = pl.lit(UNSCORED in selection.status) & pl.col("reward").fill_nan(None).is_null()
        found = found.filter(pl.col("status").is_in(selection.status) | unscored)
    if selection.reward:
        found = found.filter(pl.col("reward").is_between(selection.reward.low, selection.reward.high))
    return found


def with_messages(folder: RunFolder, chosen: pl.DataFrame, *, is_held_out: bool) -> list[dict[str, Any]]:
    """The chosen rows with their conversations, of which no others are read."""
    messages: dict[str, str] = {}
    for (step,), rows in chosen.group_by("step"):
        messages |= _messages(
            folder, int(str(step)), rows["trajectory_id"].to_list(), is_held_out=is_held_out
        )
    found = []
    for row in chosen.to_dicts():
        conversation = json.loads(messages[row["trajectory_id"]])
        answer = str(conversation[-1]["content"]) if conversation else ""
        short = short_id(row["trajectory_id"])
        found.append({"trajectory": short, **row, "answer": answer, "messages": conversation})
    return found


def _messages(folder: RunFolder, step: int, ids: list[str], *, is_held_out: bool) -> dict[str, str]:
    names = ["trajectory_id", "messages"]
    if not is_held_out:
        table = read_trajectories(folder, step, ids, names)
        return dict(zip(ids, table["messages"].to_pylist(), strict=True))
    table = read(folder, "evaluations", names, version=step)
    every = dict(zip(table["trajectory_id"].to_pylist(), table["messages"].to_pylist(), strict=True))
    return {each: every[each] for each in ids}
