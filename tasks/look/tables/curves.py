"""A run's curves by step, and the six charts of them that `rollmill plot` and the viewer draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import polars as pl

from rollmill.tasks.look.tables.run_tables import read_held_out, read_held_out_by_env
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import Scan, scan
from rollmill.tasks.store.run.manifest import read_manifest

SPANS = ("collect", "train", "evaluate", "sync")
REST = "rest"
LOW, HIGH = 0.1, 0.9
"""Quantiles over a step's groups that bound the drawn band."""
_TIME, _CAUSE = "time/", "drops/cause_"
_TRAINING = {"train/entropy_nats": "entropy", "train/gradient_norm": "gradient_norm"}
"""Columns of `Curves.training` by metric."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Data of a run's charts: tables with a column `step`, ordered by it; without rows where nothing is stored.

    Attributes:
        groups: reward, tokens (means over the step's groups), and reward_low, reward_high, tokens_low, tokens_high
            (quantiles over the groups).
        by_env: env, reward.
        held_out: reward (sampled), greedy_accuracy, and the bounds of their 95 % intervals; step is the policy version.
        held_out_by_env: env, and the columns of held_out.
        training: entropy (nats) and gradient_norm (before clipping); null where not stored.
        staleness: mean and max over the step's trajectories: policy versions between the start of a trajectory and its
            training.
        drops: cause, n trajectories.
        spans: seconds of collect, train, evaluate, sync, and the rest of the step.
    """

    groups: pl.DataFrame
    by_env: pl.DataFrame
    held_out: pl.DataFrame
    held_out_by_env: pl.DataFrame
    training: pl.DataFrame
    staleness: pl.DataFrame
    drops: pl.DataFrame
    spans: pl.DataFrame


def read_curves(folder: RunFolder, scan: Scan = scan) -> Curves:
    """Read the data of a run's charts from its data sets."""
    # Polars counts NaN, which a group without rewards has, in means and quantiles; it leaves nulls out.
    groups = scan(folder, "groups", ["step", "env", "reward_mean", "tokens_mean"]).with_columns(
        pl.col("reward_mean", "tokens_mean").fill_nan(None)
    )
    metrics = _metrics(folder, scan)
    behind = pl.col("step") - pl.col("policy_version_first")
    # Nothing was sampled in a rollout without a version (-1), and nothing is trained in a collected run: they have no staleness.
    sampled = scan(folder, "rollouts", ["step", "policy_version_first"]).filter(
        (pl.col("policy_version_first") >= 0) & pl.lit(read_manifest(folder).trains)
    )
    cause = pl.col("name").str.strip_prefix(_CAUSE).alias("cause")
    drops = metrics.filter(pl.col("name").str.starts_with(_CAUSE))
    return Curves(
        groups=_by_step(groups.group_by("step").agg(*_spread("reward"), *_spread("tokens"))),
        by_env=groups.group_by("env", "step")
        .agg(pl.col("reward_mean").mean().alias("reward"))
        .sort("env", "step")
        .collect(),
        held_out=read_held_out(folder, scan=scan),
        held_out_by_env=read_held_out_by_env(folder, scan=scan),
        training=_training(metrics),
        staleness=_by_step(
            sampled.group_by("step").agg(behind.mean().alias("mean"), behind.max().alias("max"))
        ),
        drops=drops.select("step", cause, pl.col("value").alias("n")).sort("cause", "step").collect(),
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
    """Return the stored metrics that charts draw, those over all environments, with one value for each step and name."""
    name = pl.col("name")
    is_drawn = name.is_in([*_TRAINING]) | name.str.starts_with(_TIME) | name.str.starts_with(_CAUSE)
    rows = scan(folder, "metrics", ["step", "name", "env", "stat", "value"])
    is_overall = (pl.col("env") == "all") & pl.col("stat").is_in(["value", "mean"])
    # A repeated step has stored its metrics twice; the later rows are those of the attempt that counts.
    return rows.filter(is_drawn & is_overall).unique(["step", "name"], keep="last")


def _training(metrics: pl.LazyFrame) -> pl.DataFrame:
    rows = metrics.filter(pl.col("name").is_in([*_TRAINING]))
    values = (pl.col("value").filter(pl.col("name") == each).last() for each in _TRAINING)
    columns = (value.alias(column) for value, column in zip(values, _TRAINING.values(), strict=True))
    return _by_step(rows.group_by("step").agg(*columns))


def _spans(metrics: pl.LazyFrame) -> pl.DataFrame:
    rows = metrics.filter(pl.col("name").str.starts_with(_TIME))

    def seconds(span: str) -> pl.Expr:
        return pl.col("value").filter(pl.col("name") == f"{_TIME}{span}_s").sum()

    whole = seconds("step").alias("whole")
    by_step = rows.group_by("step").agg(whole, *(seconds(span).alias(span) for span in SPANS))
    # With overlapping steps the phases may add up to more than the step.
    rest = (pl.col("whole") - pl.sum_horizontal(SPANS)).clip(lower_bound=0.0).alias(REST)
    return _by_step(by_step.select("step", *SPANS, rest))


BLUE, ORANGE, GREEN, PURPLE = "#2f6fb0", "#d9822b", "#2a9d78", "#8e6bbf"
HUES = (BLUE, ORANGE, GREEN, PURPLE, "#c2504a", "#a07a52", "#5aa9c9", "#b8a03a")
"""Colours of environments and causes, used cyclically."""
SPAN_COLOURS = dict(zip((*SPANS, REST), (BLUE, ORANGE, GREEN, PURPLE, "#c5ccd3"), strict=True))
NOTHING = "nothing to show yet"
Form: TypeAlias = Literal["line", "thin", "broad", "marked", "dotted", "band", "bars"]


@dataclass(frozen=True, slots=True)
class Series:
    """One line, band or set of bars of a chart, in one colour.

    Attributes:
        rows: columns step and value (null where there is none); for a band step, low and high.
        form: `bars` of one chart are stacked; `thin`, `broad`, `marked` and `dotted` are lines.
    """

    label: str
    colour: str
    rows: pl.DataFrame
    form: Form = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart with steps as horizontal axis, drawn by matplotlib or by Plotly.

    Attributes:
        name: its question in a word.
        unit: what its vertical axis shows.
        series: in drawing order; without those that have no rows.
        is_whole: True if its values are whole numbers.
        absent: what it says without series.
    """

    name: str
    unit: str
    series: Sequence[Series]
    is_whole: bool = False
    absent: str = NOTHING


def list_charts(curves: Curves) -> list[Chart]:
    """Return the six charts of a run: reward, length, entropy, staleness (if it is always 0, the gradient norm), drops and time."""
    groups, held_out = curves.groups, curves.held_out
    reward = [
        _band(groups, "reward", BLUE),
        _band(held_out, "reward", ORANGE, "held out, 95 %"),
        *_rewards_by_env(curves),
    ]
    reward.append(_series("training", BLUE, groups, "reward"))
    reward.append(_series("held out", ORANGE, held_out, "reward", "marked"))
    reward.append(_series("greedy accuracy", GREEN, held_out, "greedy_accuracy", "dotted"))
    length = [_band(groups, "tokens", GREEN), _series("mean", GREEN, groups, "tokens")]
    seconds = [_series(name, SPAN_COLOURS[name], curves.spans, name, "bars") for name in (*SPANS, REST)]
    no_drops = NOTHING if curves.groups.is_empty() else "none"
    charts = [
        Chart("reward", "mean of groups, 10 to 90 %", reward),
        Chart("length", "sampled tokens a trajectory", length),
        Chart("entropy", "nats a token", [_series("entropy", PURPLE, curves.training, "entropy")]),
        _chart_staleness(curves),
        Chart("drops", "trajectories by cause", _drops_by_cause(curves), is_whole=True, absent=no_drops),
        Chart("time", "seconds a step", seconds),
    ]
    return [replace(chart, series=[each for each in chart.series if len(each.rows)]) for chart in charts]


def _chart_staleness(curves: Curves) -> Chart:
    """Return the chart of staleness; that of the gradient norm if the run trains and its staleness is always 0."""
    staleness, training = curves.staleness, curves.training
    if len(training) and not staleness["max"].fill_nan(None).sum():
        norm = _series("gradient norm", ORANGE, training, "gradient_norm")
        return Chart("gradient norm", "before clipping", [norm])
    # The largest is drawn first and broad, so that the mean is visible where the two are equal.
    largest = _series("max", ORANGE, staleness, "max", "broad")
    behind = [largest, _series("mean", BLUE, staleness, "mean")]
    return Chart("staleness", "policy versions behind", behind, is_whole=True)


def _series(label: str, colour: str, rows: pl.DataFrame, column: str, form: Form = "line") -> Series:
    value = pl.col(column).cast(pl.Float64).fill_nan(None).alias("value")
    return Series(label, colour, rows.select("step", value), form)


def _band(rows: pl.DataFrame, name: str, colour: str, label: str = "10 to 90 %") -> Series:
    ends = [pl.col(f"{name}_{end}").cast(pl.Float64).fill_nan(None).alias(end) for end in ("low", "high")]
    return Series(label, colour, rows.select("step", *ends), "band")


def _rewards_by_env(curves: Curves) -> Iterator[Series]:
    """Yield the lines of each environment, training and held out in one colour, if there are several."""
    by_env, held_out = curves.by_env, curves.held_out_by_env
    envs = sorted({*by_env["env"], *held_out["env"]})
    for at, env in enumerate(envs if len(envs) > 1 else ()):
        colour = HUES[(3 + at) % len(HUES)]
        yield _series(env, colour, by_env.filter(pl.col("env") == env), "reward", "thin")
        rows = held_out.filter(pl.col("env") == env)
        yield _series(f"{env}, held out", colour, rows, "reward", "marked")


def _drops_by_cause(curves: Curves) -> list[Series]:
    """Return bars with the number of dropped trajectories for each cause, most frequent first; 0 in steps without any."""
    totals = (
        curves.drops.group_by("cause").agg(pl.col("n").sum()).sort("n", "cause", descending=[True, False])
    )
    steps = curves.groups.select("step")
    return [
        _series(
            cause,
            HUES[(4 + at) % len(HUES)],
            # A stack needs a height of each cause at each step, or the bars above it would sink.
            steps.join(
                curves.drops.filter(cause=cause), on="step", how="left", maintain_order="left"
            ).fill_null(0),
            "n",
            "bars",
        )
        for at, cause in enumerate(totals["cause"])
    ]
