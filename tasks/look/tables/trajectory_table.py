"""Tables of single trajectories, for `rollmill inspect`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.scores import explain_scorers, list_scorers_by_step, resolve_scorer
from rollmill.tasks.look.tables.selection import Selection, check_known, scan_partitions, select_partitions
from rollmill.tasks.look.tables.view import Column, View, count_noun, drop_uniform, limit_notes, order_rows
from rollmill.tasks.store.attempts import last_attempts, short_id
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, read, read_trajectories
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.schemas import SCORABLE_STATUSES
from rollmill.tasks.store.stored_batch import select_own_rows

STATUSES = ("complete", "truncated", "failed", "cancelled")
UNSCORED = "unscored"
"""Status shown for a trajectory whose score failed or is missing."""
SHOWN_ROWS = 100
"""Default limit of rows on a terminal."""

TRAJECTORY_COLUMNS = (
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
ROLLOUT_COLUMNS = (
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
BATCH_COLUMNS = ["trajectory_id", "advantage", "step", "source", "source_step"]


def make_trajectories_view(folder: RunFolder, selection: Selection) -> View:
    """Return the selected trajectories with reward, advantage and last message; raises ConfigError like `select_view`."""
    if selection.evaluations:
        versions = select_partitions(folder, "evaluations", "version", selection.steps)
        names = [*ROLLOUT_COLUMNS, "reward", "greedy"]
        rollouts = scan_partitions(folder, "evaluations", names, "version", versions)
        rollouts = rollouts.with_columns(pl.lit(None, pl.Float32).alias("advantage"))
        scorer = ""
    else:
        rollouts, scorer = _scan_sampled(folder, selection)
    if selection.group is not None:
        rollouts = rollouts.filter(pl.col("group") == selection.group)
    # The order of shards is that of their writing; ids make the order of attempts of one sample certain.
    stored = rollouts.sort("step", "group", "sample", "trajectory_id").collect()
    found = filter_trajectories(stored, selection)
    limit = SHOWN_ROWS if selection.limit is None else selection.limit
    chosen = order_rows(found, TRAJECTORY_COLUMNS, selection.sort, limit)
    rows = add_messages(folder, chosen, is_held_out=selection.evaluations)
    values = {"group": selection.group, "scorer": scorer, "n": len(found), "trajectories": rows}
    shown = name_error_types(rows)
    kind = "held-out " if selection.evaluations else ""
    n = count_noun(len(found), f"{kind}trajectory", f"{kind}trajectories")
    title = f"{n}{scorer and f', rewards by {scorer}'}"
    notes = limit_notes(len(rows), len(found), _describe_none(folder, stored, selection))
    return View(
        values,
        title,
        drop_uniform(TRAJECTORY_COLUMNS, shown, ("step", "env"), ("error", "advantage")),
        shown,
        [
            *notes,
            *_explain_copied(folder, selection, scorer),
            *(explain_scorers(folder, scorer) if scorer else ()),
        ],
    )


def _explain_copied(folder: RunFolder, selection: Selection, scorer: str) -> list[str]:
    """Say which steps of a fork have rewards by another scorer, by which they were trained."""
    by_step = list_scorers_by_step(folder, scorer) if scorer and not selection.scorer else []
    return [
        f"rewards of steps {steps.start} to {steps.stop - 1} are by {key}, which they were trained on"
        for key, steps in by_step
        if key != scorer and len(steps)
    ]


def _describe_none(folder: RunFolder, stored: pl.DataFrame, selection: Selection) -> str:
    """Return the line below a table without a row; of failed trajectories it says whether scores failed instead."""
    if stored.is_empty():
        return "none yet"
    # The error of a trajectory that can be scored is that of its score.
    n = len(stored.filter(pl.col("status").is_in(SCORABLE_STATUSES) & (pl.col("error_type") != "")))
    line = f"none of {len(stored)} matches"
    if "failed" not in selection.status or not n:
        return line
    held_out = "--evaluations " if selection.evaluations else ""
    command = f"rollmill inspect {folder.location} {held_out}--status {UNSCORED}"
    return f"{line}; {count_noun(n, 'score')} failed, see {command}"


def find_step(folder: RunFolder, group: int) -> int:
    """Return the step whose plan samples a group.

    Raises:
        ConfigError: none does, or a stored group has this number in a batch; says which groups there are, or where it is stored.
    """
    names = ["step", "first_group", "n_groups", "reason", "source", "source_step", "source_group"]
    plans = [
        plan
        for plan in read(folder, "plans", names).to_pylist()
        if plan["first_group"] <= group < plan["first_group"] + plan["n_groups"]
    ]
    for plan in plans:
        if plan["reason"] == "replay":
            where = f"group {plan['source_group']} of step {plan['source_step']} of {plan['source'] or 'this run'}"
            remedy = f"step {plan['step']} trained on a stored group in its place: {where}"
            raise ConfigError("--group", group, remedy)
    if plans:
        return int(plans[0]["step"])
    raise ConfigError("--group", group, f"the run has no such group; {describe_groups(folder)}")


def describe_groups(folder: RunFolder) -> str:
    """Describe which group numbers a run has planned. Example: "it has groups 0 to 63", or "it has no groups yet"."""
    plans = read(folder, "plans", ["first_group", "n_groups", "reason"]).to_pylist()
    plans = [plan for plan in plans if plan["reason"] != "replay"]
    last = max((plan["first_group"] + plan["n_groups"] for plan in plans), default=0) - 1
    has_gaps = sum(plan["n_groups"] for plan in plans) <= last
    gaps = ", without the numbers of refills that no step took" if has_gaps else ""
    return f"it has groups 0 to {last}{gaps}" if plans else "it has no groups yet"


def check_has_rollouts(folder: RunFolder) -> None:
    """Raise ConfigError for a run that was retrained from other runs' rollouts and has none; the error names those runs."""
    sources = [source.folder for source in read_manifest(folder).sources]
    if sources and not list_steps(folder, "plans"):
        remedy = f"it was trained on stored trajectories of other runs: {', '.join(sources)}"
        raise ConfigError("RUN", folder.location, remedy)


def _scan_sampled(folder: RunFolder, selection: Selection) -> tuple[pl.LazyFrame, str]:
    """Return the rollouts of the selected steps, last attempts only, with rewards and advantages, and the scorer's name."""
    check_has_rollouts(folder)
    if selection.group is not None:
        steps: list[int] | None = [find_step(folder, selection.group)]
    else:
        steps = select_partitions(folder, "rollouts", "step", selection.steps)
    scorer = resolve_scorer(folder, selection.scorer)
    rollouts = last_attempts(
        scan_partitions(folder, "rollouts", [*ROLLOUT_COLUMNS, "attempt"], "step", steps)
    )
    batches = scan_partitions(folder, "batches", BATCH_COLUMNS, "step", steps)
    scores = None
    if scorer:
        scores = _scan_scores(folder, steps, scorer, is_default=not selection.scorer)
    return join_rewards(rollouts, batches, scores), scorer or ""


def _scan_scores(
    folder: RunFolder, steps: list[int] | None, scorer: str, *, is_default: bool
) -> pl.LazyFrame:
    """Return the scores of the selected steps, by the scorer that each is trained by if none was chosen."""
    by_step = list_scorers_by_step(folder, scorer) if is_default else []
    if len({key for key, _ in by_step}) < 2:
        return scan_partitions(folder, "scores", SCORE_COLUMNS, "step", steps, scorer=scorer)
    chosen = list_steps(folder, "rollouts") if steps is None else steps
    of_each = [(key, [step for step in chosen if step in own]) for key, own in by_step]
    parts = [
        scan_partitions(folder, "scores", SCORE_COLUMNS, "step", own, scorer=key)
        for key, own in of_each
        if own
    ]
    return (
        pl.concat(parts)
        if parts
        else scan_partitions(folder, "scores", SCORE_COLUMNS, "step", None, scorer=scorer)
    )


def join_rewards(rollouts: pl.LazyFrame, batches: pl.LazyFrame, scores: pl.LazyFrame | None) -> pl.LazyFrame:
    """Join rollouts with their advantages, rewards and score errors; without scores there are no rewards."""
    # A step that was repeated after a kill may have stored a row twice.
    own = select_own_rows(batches).select("trajectory_id", "advantage").unique("trajectory_id")
    found = rollouts.join(own, on="trajectory_id", how="left")
    if scores is None:
        return found.with_columns(pl.lit(None, pl.Float64).alias("reward"))
    found = found.join(scores.unique("trajectory_id"), on="trajectory_id", how="left", suffix="_of_score")
    return found.with_columns(
        pl.when(pl.col(name) == "").then(pl.col(f"{name}_of_score")).otherwise(name).fill_null("").alias(name)
        for name in ("error_type", "error")
    ).drop("error_type_of_score", "error_of_score")


def filter_trajectories(found: pl.DataFrame, selection: Selection) -> pl.DataFrame:
    """Return the trajectories with the selected environment, status and reward; raises ConfigError for an unknown one.

    The column `reward` is needed only to select by reward, or to select unscored trajectories.
    """
    if selection.env:
        check_known("--env", selection.env, found["env"].unique())
        found = found.filter(pl.col("env") == selection.env)
    for status in selection.status:
        check_known("--status", status, (*STATUSES, UNSCORED))
    if selection.status:
        is_selected = pl.col("status").is_in(selection.status)
        if UNSCORED in selection.status:
            is_selected |= pl.col("reward").fill_nan(None).is_null()
        found = found.filter(is_selected)
    if selection.reward:
        found = found.filter(pl.col("reward").is_between(selection.reward.low, selection.reward.high))
    return found


def name_error_types(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows whose `error` begins with its type, as tables show it. Example: "ValueError: no number"."""
    return [{**row, "error": ": ".join(filter(None, (row["error_type"], row["error"])))} for row in rows]


def add_messages(folder: RunFolder, chosen: pl.DataFrame, *, is_held_out: bool) -> list[dict[str, Any]]:
    """Return the chosen rows as dictionaries with their `messages`, the last message's text as `answer`, and the `problem`'s id.

    No other conversations are read.
    """
    read_rows: dict[str, tuple[str, str]] = {}
    names = ["trajectory_id", "messages", "example_id"]
    for step in chosen["step"].unique():
        ids = chosen.filter(pl.col("step") == step)["trajectory_id"].to_list()
        if is_held_out:
            table = read(folder, "evaluations", names, version=step)
        else:
            table = read_trajectories(folder, step, ids, names)
        ids, messages, problems = (table[name].to_pylist() for name in names)
        read_rows |= zip(ids, zip(messages, problems, strict=True), strict=True)
    found = []
    for row in chosen.to_dicts():
        messages_json, problem = read_rows[row["trajectory_id"]]
        conversation = json.loads(messages_json)
        answer = str(conversation[-1]["content"]) if conversation else ""
        short = short_id(row["trajectory_id"])
        found.append(
            {"trajectory": short, **row, "problem": problem, "answer": answer, "messages": conversation}
        )
    return found
