"""A run as a picture: six small charts over one axis of steps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from flows.looking.curves import REST, SPANS, Curves, read_curves
from tasks.errors import ConfigError
from tasks.store.layout import RunFolder

PICTURE = "plot.png"
INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN = "#2f6fb0", "#d9822b", "#2a9d78"
HUES = (BLUE, ORANGE, GREEN, "#8e6bbf", "#c2504a", "#a07a52", "#5aa9c9", "#b8a03a")
"""Colours of what has no colour of its own: environments, causes; they begin again after the last."""
SPAN_COLOURS = dict(zip((*SPANS, REST), (BLUE, ORANGE, GREEN, "#8e6bbf", "#c5ccd3"), strict=True))
LEGEND_COLUMNS = 3
FORMATS = ("png", "svg", "pdf", "jpg")
MOST_BARS = 120
"""Of more steps several share a bar, and lines are running means."""
MOST_MARKERS = 60
"""Points that are marked as such: of more a line shows enough."""


def plot_run(folder: RunFolder, output: Path | None = None) -> Path:
    """Draw a run; returns the picture's path, by default plot.png in the run's folder on this machine.

    Raises:
        ConfigError: the picture cannot be written there, or not in the format of that suffix.
    """
    path = output or folder.local / PICTURE
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise ConfigError("--output", str(path), f"give a name that ends in .{', .'.join(FORMATS)}")
    figure = draw(folder.name, read_curves(folder))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, format=form)
    except OSError as error:
        raise ConfigError(
            "--output", str(path), f"the picture cannot be written: {error.strerror}"
        ) from error
    return path


def draw(title: str, curves: Curves) -> Figure:
    """The six charts; one that has no data says so."""
    figure = Figure(
        figsize=(12.5, 7.2), facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    )
    n_steps = len(curves.groups)
    figure.suptitle(
        f"{title}   ·   {n_steps} {'step' if n_steps == 1 else 'steps'}",
        x=0.01,
        ha="left",
        color=INK,
        weight="bold",
    )
    charts: tuple[tuple[str, str, Callable[[Axes, Curves], bool]], ...] = (
        ("reward", "mean and spread of groups", _reward),
        ("length", "sampled tokens a trajectory", _length),
        ("entropy", "nats a token", _entropy),
        ("staleness", "versions behind", _staleness),
        ("drops", "trajectories by cause", _drops),
        ("time", "seconds a step", _time),
    )
    axes = figure.subplots(2, 3, sharex=True)
    for axis, (name, unit, chart) in zip(axes.flat, charts, strict=True):
        _prepare(axis, name, unit)
        if not chart(axis, curves):
            axis.text(
                0.5, 0.5, "nothing to show", transform=axis.transAxes, ha="center", va="center", color=MUTED
            )
            axis.set_yticks([])
    return figure


def _prepare(axis: Axes, name: str, unit: str) -> None:
    axis.set_title(name, loc="left", color=INK, fontsize=11, weight="bold")
    axis.set_title(unit, loc="right", color=MUTED, fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(GRID)
    axis.tick_params(colors=MUTED, labelsize=9, length=0, labelbottom=True)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _reward(axis: Axes, curves: Curves) -> bool:
    envs = curves.by_env["env"].unique(maintain_order=True).to_list()
    _band(axis, curves.groups, "reward", BLUE)
    if len(envs) > 1:
        for env, colour in zip(envs, _hues(len(envs), first=3), strict=False):
            rows = curves.by_env.filter(pl.col("env") == env)
            _line(axis, rows["step"], rows["reward"], colour, env, linewidth=1.0, alpha=0.8)
    _line(axis, curves.groups["step"], curves.groups["reward"], BLUE, "training")
    held_out = curves.held_out
    if len(held_out):
        axis.plot(
            held_out["step"],
            held_out["reward"],
            "o-",
            color=ORANGE,
            ms=4.5,
            lw=1.2,
            label="held out",
        )
        axis.plot(
            held_out["step"],
            held_out["greedy_accuracy"],
            "s:",
            color=GREEN,
            ms=4,
            lw=1.2,
            label="greedy accuracy",
        )
    if curves.groups.is_empty() and held_out.is_empty():
        return False
    _legend(axis)
    return True


def _length(axis: Axes, curves: Curves) -> bool:
    _band(axis, curves.groups, "tokens", GREEN)
    _line(axis, curves.groups["step"], curves.groups["tokens"], GREEN, "mean")
    _from_zero(axis)
    return bool(len(curves.groups))


def _entropy(axis: Axes, curves: Curves) -> bool:
    _line(axis, curves.entropy["step"], curves.entropy["entropy"], "#8e6bbf", "entropy")
    _from_zero(axis)
    return bool(len(curves.entropy))


def _staleness(axis: Axes, curves: Curves) -> bool:
    rows = curves.staleness
    _line(axis, rows["step"], rows["max"], ORANGE, "max", linewidth=4.0, alpha=0.5)
    _line(axis, rows["step"], rows["mean"], BLUE, "mean")
    axis.set_ylim(-0.05, max(1.0, _largest(rows["max"])) * 1.15)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    if len(rows):
        _legend(axis)
    return bool(len(rows))


def _drops(axis: Axes, curves: Curves) -> bool:
    if curves.groups.is_empty():
        return False
    causes = (
        curves.drops.group_by("cause").agg(pl.col("n").sum()).sort("n", "cause", descending=[True, False])
    )
    steps = pl.DataFrame({"step": curves.groups["step"]})
    for cause in causes["cause"]:
        rows = curves.drops.filter(pl.col("cause") == cause).select("step", pl.col("n").alias(cause))
        steps = steps.join(rows, on="step", how="left")
    steps = steps.fill_null(0.0)
    _stacked_bars(
        axis,
        steps,
        causes["cause"].to_list(),
        dict(zip(causes["cause"], _hues(len(causes), first=4), strict=True)),
    )
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    if causes.is_empty():
        axis.set_yticks([])
        axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center", va="center", color=MUTED)
    return True


def _time(axis: Axes, curves: Curves) -> bool:
    if curves.spans.is_empty():
        return False
    _stacked_bars(axis, curves.spans, [*SPANS, REST], SPAN_COLOURS)
    return True


def _line(
    axis: Axes,
    steps: pl.Series,
    values: pl.Series,
    colour: str,
    label: str,
    *,
    linewidth: float = 1.8,
    alpha: float = 1.0,
) -> None:
    """A line that is broken where there is no value; of few points with marks, of many a running mean over them."""
    numbers = values.cast(pl.Float64).fill_nan(None)
    if len(numbers) > MOST_BARS:
        axis.plot(steps, numbers, color=colour, lw=0.6, alpha=0.25 * alpha)
        window = len(numbers) // MOST_MARKERS
        running = numbers.rolling_mean(window, min_samples=1, center=True)
        numbers = running.to_frame("mean").select(pl.when(numbers.is_not_null()).then("mean"))["mean"]
    marker = "o" if len(numbers) - numbers.null_count() <= MOST_MARKERS else ""
    axis.plot(steps, numbers, color=colour, lw=linewidth, alpha=alpha, label=label, marker=marker, ms=2.5)


def _band(axis: Axes, groups: pl.DataFrame, name: str, colour: str) -> None:
    low, high = (groups[f"{name}_{end}"].cast(pl.Float64).to_numpy() for end in ("low", "high"))
    axis.fill_between(
        groups["step"].to_numpy(), low, high, color=colour, alpha=0.13, lw=0, label="10 to 90 %"
    )


def _stacked_bars(axis: Axes, rows: pl.DataFrame, names: list[str], colours: dict[str, str]) -> None:
    """Bars of one step each, or of the mean of several where there are many."""
    per_bar = max(1, -(-len(rows) // MOST_BARS))
    bars = (
        rows.with_row_index("bar")
        .with_columns(pl.col("bar") // per_bar)
        .group_by("bar", maintain_order=True)
        .agg(pl.col("step").mean(), pl.col(*names).mean() if names else pl.len())
    )
    bottom = np.zeros(len(bars))
    for name in names:
        heights = bars[name].to_numpy()
        axis.bar(
            bars["step"],
            heights,
            per_bar if per_bar > 1 else 0.9,
            bottom=bottom,
            color=colours[name],
            label=name,
            lw=0,
        )
        bottom = bottom + heights
    if names:
        _legend(axis)


def _legend(axis: Axes) -> None:
    """Names below the chart, where they cover nothing."""
    axis.legend(
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        ncols=LEGEND_COLUMNS,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.13),
        borderaxespad=0.0,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _from_zero(axis: Axes) -> None:
    top = axis.get_ylim()[1]
    axis.set_ylim(0, top * 1.08 if top > 0 else 1.0)


def _largest(values: pl.Series) -> float:
    largest = values.cast(pl.Float64).fill_nan(None).max()
    return float(largest) if isinstance(largest, float) else 0.0


def _hues(n: int, first: int = 0) -> list[str]:
    return [HUES[(first + i) % len(HUES)] for i in range(n)]
