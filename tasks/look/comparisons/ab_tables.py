"""The tables of an A/B comparison: policies under scorers, their differences, and where two scorers disagree most."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import polars as pl

from rollmill.tasks.look.comparisons.paired_evaluations import (
    PROMPT_KEYS,
    average_answers,
    compute_paired_interval,
)
from rollmill.tasks.look.tables.run_tables import mean_with_interval
from rollmill.tasks.look.tables.view import Column, View, count_noun
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read_trajectories, scan

ROUNDED_DIGITS = 6
"""Differences of advantages are compared to so many decimals: equal ones may differ by rounding."""
# Largest difference of equal rewards, relative to the largest of them, as in the advantages that training computes.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ScoredPolicy:
    """A policy whose evaluation has rewards by every compared scorer.

    Attributes:
        label: its name in tables.
        run: stores the evaluation.
        version: of the policy.
        own: NAME@VERSION of the scorer of the rewards in `evaluations`; empty: all are in `evaluation_scores`.
    """

    label: str
    run: RunFolder
    version: int
    own: str = ""


def read_rewards(policy: ScoredPolicy, scorers: Sequence[str]) -> pl.DataFrame:
    """Read the mean reward of each held-out prompt under each scorer: of its greedy answer, and of its sampled ones.

    Columns: those of PROMPT_KEYS, and one for each scorer, called NAME@VERSION; an answer without a reward counts as 0.
    """
    names = ["env", "example_id", "example", "group", "greedy", "trajectory_id", "reward"]
    rows = scan(policy.run, "evaluations", names, version=policy.version)
    for scorer in scorers:
        if scorer == policy.own:
            rows = rows.with_columns(pl.col("reward").alias(scorer))
            continue
        partition: dict[str, str | int] = {"scorer": scorer, "step": policy.version}
        scores = scan(policy.run, "evaluation_scores", ["trajectory_id", "reward"], **partition)
        scores = scores.unique("trajectory_id", keep="last", maintain_order=True)
        rows = rows.join(scores.rename({"reward": scorer}), on="trajectory_id", how="left")
    return average_answers(rows, scorers)


def make_policies_view(
    policies: Sequence[ScoredPolicy], scorers: Sequence[str], arms: Sequence[tuple[str, RunFolder]]
) -> View:
    """Return the table of each policy's mean held-out reward under each scorer, with 95 % intervals; below it what the arms cost.

    `arms` are labels and runs of the arms.
    """
    values, rows = [], []
    for policy in policies:
        rewards = read_rewards(policy, scorers)
        for answers, of_kind in _split_answers(rewards):
            row: dict[str, object] = {"answers": answers, "policy": policy.label, "n": len(of_kind)}
            for scorer in scorers:
                found = of_kind.select(mean_with_interval(pl.col(scorer))).row(0, named=True)
                values.append({**row, "scorer": scorer, **found})
                row[scorer] = _format(found["reward"], found["reward_low"], found["reward_high"])
            rows.append(row)
    rows.sort(key=lambda row: str(row["answers"]), reverse=True)
    columns = [
        Column("answers"),
        Column("policy"),
        Column("n", rank=2, header="prompts"),
        *(Column(scorer, rank=1, is_text=True) for scorer in scorers),
    ]
    title = "mean held-out reward of each policy under each scorer, with 95 % intervals"
    n_training, n_evaluations = count_tokens([run for _, run in arms])
    notes = [
        *(describe_arm(label, run) for label, run in arms),
        f"tokens sampled: {n_training} for training, {n_evaluations:,} for the evaluations",
    ]
    sampled = {"training": n_training, "evaluations": n_evaluations}
    return View({"policies": values, "tokens_sampled": sampled}, title, columns, rows, notes)


def make_differences_view(policies: Sequence[ScoredPolicy], scorers: Sequence[str]) -> View:
    """Return the table of differences between policies under each scorer, on the same held-out prompts, with 95 % intervals."""
    rewards = [read_rewards(policy, scorers) for policy in policies]
    values, rows = [], []
    for first, second in combinations(range(len(policies)), 2):
        joined = rewards[second].join(rewards[first], on=PROMPT_KEYS, suffix=" before")
        for answers, of_kind in _split_answers(joined):
            row: dict[str, object] = {
                "answers": answers,
                "policy": policies[second].label,
                "against": policies[first].label,
                "n": len(of_kind),
            }
            for scorer in scorers:
                found = _compare(of_kind, scorer)
                values.append({**row, "scorer": scorer, **found})
                row[scorer] = _format(found["difference"], found["low"], found["high"], sign="+")
            rows.append(row)
    rows.sort(key=lambda row: str(row["answers"]), reverse=True)
    columns = [
        *(Column("answers"), Column("policy"), Column("against")),
        Column("n", rank=2, header="prompts"),
        *(Column(scorer, rank=1, is_text=True) for scorer in scorers),
    ]
    title = "differences of mean reward on the same prompts, with 95 % intervals"
    return View({"differences": values}, title, columns, rows)


def _compare(joined: pl.DataFrame, scorer: str) -> dict[str, float | None]:
    after, before = joined[scorer].to_numpy(), joined[f"{scorer} before"].to_numpy()
    # The largest possible difference is not known: rewards are mostly between 0 and 1, and few of them may differ.
    span = max(1.0, float(max(after.max(), before.max()) - min(after.min(), before.min())))
    bounds = compute_paired_interval(after - before, span)
    low, high = bounds or (None, None)
    return {"difference": float((after - before).mean()), "low": low, "high": high}


def _split_answers(rewards: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    kinds = [("sampled", rewards.filter(~pl.col("greedy"))), ("greedy", rewards.filter("greedy"))]
    return [(name, rows) for name, rows in kinds if not rows.is_empty()]


def _format(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign}z.3f}" + ("" if low is None else f" ({low:{sign}z.3f} to {high:{sign}z.3f})")


def make_disagreements_view(run: RunFolder, scorers: tuple[str, str], viewer_url: str, limit: int) -> View:
    """Return the table of the trajectories on whose advantage two scorers disagree most, one of each group, largest first.

    The advantages are comparable: rewards minus their mean in the group, divided by their standard deviation there, 0 without spread.

    Args:
        run: has the scores.
        scorers: NAME@VERSION of both.
        viewer_url: address of the viewer; empty: no links.
        limit: number of rows; 0: all.
    """
    found = _read_disagreements(run, scorers)
    shown = found.head(limit) if limit else found
    answers = _read_answers(run, shown)
    rows = [
        {
            **{name: row[name] for name in ("step", "a", "b", "advantage_a", "advantage_b", "difference")},
            **answers[row["trajectory_id"]],
            "trajectory": (short := short_id(row["trajectory_id"])),
            "link": f"{viewer_url}/trajectory/{short}" if viewer_url else None,
        }
        for row in shown.to_dicts()
    ]
    first, second = scorers
    columns = [
        *(Column("trajectory"), Column("example_id", header="problem", is_text=True)),
        Column("answer", rank=2, is_text=True),
        *(Column("a", rank=1, header=first), Column("b", rank=1, header=second)),
        *(
            Column("advantage_a", rank=3, digits=1, header="advantage"),
            Column("advantage_b", rank=3, digits=1, header="advantage"),
        ),
        *(Column("difference", rank=1, digits=1), Column("link", rank=4)),
    ]
    if not viewer_url:
        columns.pop()
    title = f"where {first} and {second} disagree most: {len(rows)} of {count_noun(len(found), 'group')}, largest difference of advantages first"
    notes = [
        f"all trajectories, while `rollmill view {run.location}` runs: {viewer_url}/compare?a={first}&b={second}"
    ]
    return View({"disagreements": rows}, title, columns, rows, notes if viewer_url else ())


def _standardize(rewards: pl.Expr) -> pl.Expr:
    """Return rewards minus their mean, divided by their standard deviation; 0 where they differ by no more than rounding."""
    differ = (rewards.max() - rewards.min()) > _ROUNDING * rewards.abs().max()
    return pl.when(differ).then((rewards - rewards.mean()) / rewards.std(ddof=0)).otherwise(0.0)


def _read_disagreements(run: RunFolder, scorers: tuple[str, str]) -> pl.DataFrame:
    """Return the trajectory of largest difference of each group: columns step, group, trajectory_id, a, b, advantage_a, advantage_b, difference."""
    names = ["step", "group", "trajectory_id", "status", "reward"]
    first, second = (
        scan(run, "scores", names, scorer=scorer)
        .filter(pl.col("status") == "scored")
        .unique("trajectory_id", keep="last", maintain_order=True)
        for scorer in scorers
    )
    both = first.rename({"reward": "a"}).join(
        second.select("trajectory_id", pl.col("reward").alias("b")), on="trajectory_id"
    )
    of_group = ["step", "group"]
    advantages = [_standardize(pl.col(name)).over(of_group).alias(f"advantage_{name}") for name in ("a", "b")]
    difference = (pl.col("advantage_b") - pl.col("advantage_a")).alias("difference")
    return (
        both.with_columns(advantages)
        .with_columns(difference)
        .filter(pl.col("difference").is_finite() & (pl.col("difference").abs() > 10.0**-ROUNDED_DIGITS))
        .sort(
            pl.col("difference").abs().round(ROUNDED_DIGITS),
            "step",
            "group",
            "trajectory_id",
            descending=[True, False, False, False],
        )
        .unique(of_group, keep="first", maintain_order=True)
        .drop("status")
        .collect()
    )


def _read_answers(run: RunFolder, chosen: pl.DataFrame) -> dict[str, dict[str, object]]:
    """Return the problem and the last message of each chosen trajectory, by its id."""
    found: dict[str, dict[str, object]] = {}
    for (step,), rows in chosen.group_by("step"):
        ids, names = rows["trajectory_id"].to_list(), ["trajectory_id", "example_id", "messages"]
        for row in read_trajectories(run, int(str(step)), ids, names).to_pylist():
            said = [each["content"] for each in json.loads(row["messages"]) if each["role"] == "assistant"]
            found[row["trajectory_id"]] = {
                "example_id": row["example_id"],
                "answer": said[-1] if said else "",
            }
    return found


def describe_arm(label: str, run: RunFolder) -> str:
    """Describe in a line what an arm was trained on, and how far from the stored policies it is."""
    groups = scan(run, "groups", ["step", "reason", "survived", "tokens_mean"]).filter(pl.col("reason") == "")
    n_steps, n_groups, tokens = (
        groups.select(pl.col("step").n_unique(), pl.len(), (pl.col("survived") * pl.col("tokens_mean")).sum())
        .collect()
        .row(0)
    )
    metrics = scan(run, "metrics", ["step", "name", "env", "value"]).filter(pl.col("env") == ALL)
    last = dict(
        metrics.sort("step")
        .group_by("name", maintain_order=True)
        .agg(pl.col("value").last())
        .collect()
        .rows()
    )
    distance = "".join(
        f", {words} {last[name]:.2f}"
        for name, words in (
            ("train/effective_share", "effective share of tokens"),
            ("train/ratio", "mean ratio"),
        )
        if name in last
    )
    return (
        f"{label}: {run.location}, {count_noun(n_steps, 'step')} on {count_noun(n_groups, 'group')}, {tokens:,.0f} stored tokens"
        f"{distance and f'; at its last step{distance[1:]}'}"
    )


def count_tokens(runs: Sequence[RunFolder]) -> tuple[int, int]:
    """Count the tokens that were sampled by some runs: for training, and for evaluations."""
    sums = [
        sum(int(scan(run, dataset, ["n_completion_tokens"]).sum().collect().item() or 0) for run in runs)
        for dataset in ("rollouts", "evaluations")
    ]
    return sums[0], sums[1]
