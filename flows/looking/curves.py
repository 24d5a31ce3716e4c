"""A run as numbers by step: what `rollmill plot` draws."""

from dataclasses import dataclass

import polars as pl

from flows.looking.inspection import held_out
from tasks.store.layout import RunFolder
from tasks.store.reader import Scan, scan

SPANS = ("collect", "train", "evaluate", "sync")
REST = "rest"
LOW, HIGH = 0.1, 0.9
"""Quantiles over a step's groups, between which a band is drawn."""
_ENTROPY, _TIME, _CAUSE = "train/entropy_nats", "time/", "drops/cause_"


@dataclass(frozen=True, slots=True)
class Curves:
    """Frames with a column `step` each, in its order; without rows where nothing is stored.

    Attributes:
        groups: reward, tokens (means over the step's groups), and for both _low and _high, quantiles over the groups.
        by_env: env, reward.
        held_out: reward (sampled), greedy_accuracy; step is the policy version.
        entropy: entropy in nats.
        staleness: mean and max over the step's trajectories, in policy versions between the one that a trajectory
            began with and the one that it trains.
        drops: cause, n trajectories.
        spans: seconds of collect, train, evaluate, sync, and the rest of the step.
    """

    groups: pl.DataFrame
    by_env: pl.DataFrame
    held_out: pl.DataFrame
    entropy: pl.DataFrame
    staleness: pl.DataFrame
    drops: pl.DataFrame
    spans: pl.DataFrame


def read_curves(folder: RunFolder, scan: Scan = scan) -> Curves:
    """Read a run's curves, of a few columns of its data sets."""
    groups = scan(folder, "groups", ["step", "env", "reward_mean", "tokens_mean"]).with_columns(
        pl.col("reward_mean", "tokens_mean").fill_nan(None)
    )
    metrics = _metrics(folder, scan)
    return Curves(
        groups=_by_step(groups.group_by("step").agg(*_spread("reward"), *_spread("tokens"))),
        by_env=groups.group_by("env", "step")
        .agg(pl.col("reward_mean").mean().alias("reward"))
        .sort("env", "step")
        .collect(),
        held_out=held_out(folder, scan=scan),
        entropy=_by_step(
            metrics.filter(pl.col("name") == _ENTROPY).select("step", pl.col("value").alias("entropy"))
        ),
        staleness=_staleness(folder, scan),
        drops=_drops(metrics),
        spans=_spans(metrics),
    )


def _by_step(frame: pl.LazyFrame) -> pl.DataFrame:
    return frame.sort("step").collect()


def _spread(name: str) -> list[pl.Expr]:
    values = pl.col(f"{name}_mean")
    return [
        values.mean().alias(name),
        values.quantile(LOW).alias(f"{name}_low"),
        values.quantile(HIGH).alias(f"{name}_high"),
    ]


def _metrics(folder: RunFolder, scan: Scan) -> pl.LazyFrame:
    """The metrics of all environments together that are drawn, one value a step."""
    name = pl.col("name")
    is_drawn = (name == _ENTROPY) | name.str.starts_with(_TIME) | name.str.starts_with(_CAUSE)
    rows = scan(folder, "metrics", ["step", "name", "env", "stat", "value"])
    is_told = (pl.col("env") == "all") & pl.col("stat").is_in(["value", "mean"])
    return rows.filter(is_drawn & is_told).unique(["step", "name"], keep="last")


def _staleness(folder: RunFolder, scan: Scan) -> pl.DataFrame:
    behind = pl.col("step") - pl.col("policy_version_first")
    rows = scan(folder, "rollouts", ["step", "policy_version_first"]).filter(
        pl.col("policy_version_first") >= 0
    )
    return _by_step(rows.group_by("step").agg(behind.mean().alias("mean"), behind.max().alias("max")))


def _drops(metrics: pl.LazyFrame) -> pl.DataFrame:
    rows = metrics.filter(pl.col("name").str.starts_with(_CAUSE))
    cause = pl.col("name").str.strip_prefix(_CAUSE).alias("cause")
    return rows.select("step", cause, pl.col("value").alias("n")).sort("cause", "step").collect()


def _spans(metrics: pl.LazyFrame) -> pl.DataFrame:
    rows = metrics.filter(pl.col("name").str.starts_with(_TIME))

    def seconds(span: str) -> pl.Expr:
        return pl.col("value").filter(pl.col("name") == f"{_TIME}{span}_s").sum()

    whole = seconds("step").alias("whole")
    by_step = rows.group_by("step").agg(whole, *(seconds(span).alias(span) for span in SPANS))
    rest = (pl.col("whole") - pl.sum_horizontal(SPANS)).clip(lower_bound=0.0).alias(REST)
    return _by_step(by_step.select("step", *SPANS, rest))
