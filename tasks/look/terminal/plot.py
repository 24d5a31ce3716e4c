"""Draw a run, or several together, as an image: six small charts over one axis of steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.comparisons.run_overlay import check_names, overlay_charts
from rollmill.tasks.look.tables.curves import Chart, Curves, Series, list_charts, read_curves
from rollmill.tasks.look.tables.run_tables import check_rollouts
from rollmill.tasks.look.tables.view import count_noun
from rollmill.tasks.store.folders import RunFolder

PICTURE, PICTURE_OF_SEVERAL = "plot.png", "runs.png"
INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
LEGEND_COLUMNS = 3
FORMATS = ("png", "svg", "pdf", "jpg")
# With more steps, several share a bar and lines are running means: finer ones blur at this size.
MOST_BARS = 120
# Lines with at most this many points get marks; more would touch each other.
MOST_MARKERS = 60
LINES: dict[str, dict[str, Any]] = {
    "line": {"lw": 1.8, "ms": 2.5},
    "thin": {"lw": 1.0, "ms": 2.5, "alpha": 0.8},
    "broad": {"lw": 4.0, "ms": 2.5, "alpha": 0.5},
}
"""Matplotlib's settings of a line that becomes a running mean with many steps, by form."""
POINTS: dict[str, dict[str, Any]] = {
    "marked": {"marker": "o", "ms": 4.5, "lw": 1.2},
    "dotted": {"marker": "s", "ms": 4, "ls": ":", "lw": 1.2},
}
"""Settings of a line whose points are all drawn, by form."""


def plot_run(folder: RunFolder, output: Path | None = None, others: Sequence[RunFolder] = ()) -> Path:
    """Draw the charts of a run into an image file and return its path; by default plot.png in the run's local folder.

    With `others` each chart has a line of each run; by default the file is then runs.png in the working folder.

    Raises:
        ConfigError: the image cannot be written there, or its suffix is of no supported image format.
        ShardError: the run's rollouts are gone.
    """
    path = output or (Path(PICTURE_OF_SEVERAL) if others else folder.local / PICTURE)
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise ConfigError("--output", str(path), f"give a name that ends in .{', .'.join(FORMATS)}")
    for each in (folder, *others):
        check_rollouts(each)
    check_names([folder, *others])
    runs = {each.name: read_curves(each) for each in (folder, *others)}
    figure = (
        draw_charts(", ".join(runs), overlay_charts(runs)) if others else draw(folder.name, runs[folder.name])
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, format=form)
    except OSError as error:
        raise ConfigError(
            "--output", str(path), f"the picture cannot be written: {error.strerror}"
        ) from error
    return path


def draw(title: str, curves: Curves) -> Figure:
    """Return a figure with charts of reward, length, entropy, staleness, drops and time; one without data has a note."""
    n_steps = count_noun(len(curves.groups), "step")
    return draw_charts(f"{title}   ·   {n_steps}", list_charts(curves))


def draw_charts(title: str, charts: Sequence[Chart]) -> Figure:
    """Return a figure with charts, three in a row."""
    n_rows = -(-len(charts) // 3)
    figure = Figure(
        figsize=(12.5, 3.6 * n_rows),
        facecolor="white",
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    figure.suptitle(title, x=0.01, ha="left", color=INK, weight="bold")
    axes = figure.subplots(n_rows, 3, sharex=True, squeeze=False).flat
    for axis, chart in zip(axes, charts, strict=False):
        _draw_chart(axis, chart)
    for axis in [*axes][len(charts) :]:
        axis.set_axis_off()
    return figure


def _draw_chart(axis: Axes, chart: Chart) -> None:
    axis.set_title(chart.name, loc="left", color=INK, fontsize=11, weight="bold")
    axis.set_title(chart.unit, loc="right", color=MUTED, fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(GRID)
    axis.tick_params(colors=MUTED, labelsize=9, length=0, labelbottom=True)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if not chart.series:
        axis.text(0.5, 0.5, chart.absent, transform=axis.transAxes, ha="center", va="center", color=MUTED)
        axis.set_yticks([])
        return
    for each in chart.series:
        if each.form == "band":
            steps, low, high = (each.rows[name].to_numpy() for name in ("step", "low", "high"))
            axis.fill_between(steps, low, high, color=each.colour, alpha=0.13, lw=0, label=each.label)
        elif each.form in POINTS:
            style = POINTS[each.form]
            axis.plot(each.rows["step"], each.rows["value"], color=each.colour, label=each.label, **style)
        elif each.form in LINES:
            _draw_line(axis, each)
    _stack_bars(axis, [each for each in chart.series if each.form == "bars"])
    _scale_values(axis, chart)
    if len(chart.series) > 1 or chart.series[0].form == "bars":
        # Below the chart the legend covers nothing.
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


def _draw_line(axis: Axes, series: Series) -> None:
    """Draw a series as a line with gaps at missing values; few points have markers, many get a running mean too."""
    steps, values, style = series.rows["step"], series.rows["value"], LINES[series.form]
    if len(values) > MOST_BARS:
        axis.plot(steps, values, color=series.colour, lw=0.6, alpha=0.25 * style.get("alpha", 1.0))
        window = len(values) // MOST_MARKERS
        running = values.rolling_mean(window, min_samples=1, center=True)
        # The running mean would close the gaps.
        values = running.to_frame("mean").select(pl.when(values.is_not_null()).then("mean"))["mean"]
    marker = "o" if values.count() <= MOST_MARKERS else ""
    axis.plot(steps, values, color=series.colour, label=series.label, marker=marker, **style)


def _stack_bars(axis: Axes, stack: Sequence[Series]) -> None:
    """Draw one bar for each step, or for the mean of several steps if there are many."""
    bottom: Any = 0.0
    for each in stack:
        per_bar = max(1, -(-len(each.rows) // MOST_BARS))
        bars = each.rows.group_by(pl.int_range(pl.len()).alias("bar") // per_bar, maintain_order=True).mean()
        width = per_bar if per_bar > 1 else 0.9
        heights = bars["value"].to_numpy()
        axis.bar(bars["step"], heights, width, bottom=bottom, color=each.colour, label=each.label, lw=0)
        bottom = bottom + heights


def _scale_values(axis: Axes, chart: Chart) -> None:
    """Start the vertical axis at 0, except for rewards; a chart of whole numbers gets ticks at whole numbers only."""
    if chart.name == "reward":
        return
    top = axis.get_ylim()[1]
    top = max(top, 1.0) if chart.is_whole else top if top > 0 else 1.0
    # A line at 0 has half of its width below it.
    axis.set_ylim(-0.04 * top if chart.series[0].form == "broad" else 0, top * 1.08)
    if chart.is_whole:
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
