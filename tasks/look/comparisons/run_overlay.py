"""Charts of several runs over one axis of steps, a colour for each, and their answers to the same held-out problems."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.curves import HUES, Chart, Curves, Series, list_charts
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, scan

MAX_RUNS = len(HUES)
# Lines of a run's charts that stay if several runs share a chart, by the chart's name, and what follows the run's name in their
# labels; bands and bars would hide each other.
_KEPT = {
    "reward": {"training": " training", "held out": " held out", "greedy accuracy": " greedy"},
    "length": {"mean": ""},
    "entropy": {"entropy": ""},
    "gradient norm": {"gradient norm": ""},
    "staleness": {"mean": ""},
}
_ANSWERS = ["example_id", "env", "greedy", "reward", "trajectory_id"]


def check_names(folders: Sequence[RunFolder]) -> None:
    """Raise ConfigError if runs cannot be distinguished: two have the same name, or there are more than colours."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError("RUN", ", ".join(names), "runs that are shown together need different names")
    if len(names) > MAX_RUNS:
        raise ConfigError("RUN", ", ".join(names), f"at most {MAX_RUNS} runs can be shown together")


def overlay_charts(runs: Mapping[str, Curves]) -> list[Chart]:
    """Return charts with a line of each run: reward, length, entropy, gradient norm or staleness, dropped trajectories, seconds.

    At most `MAX_RUNS` runs have colours.
    """
    merged: dict[str, Chart] = {}
    for colour, (name, curves) in zip(HUES, runs.items(), strict=False):
        for chart in list_charts(curves):
            lines = [*_lines(chart, name, colour)]
            unit = chart.unit.partition(",")[0]
            known = merged.setdefault(chart.name, replace(chart, unit=unit, series=[]))
            merged[chart.name] = replace(known, series=[*known.series, *lines])
    return [*merged.values()]


def _lines(chart: Chart, run: str, colour: str) -> Iterator[Series]:
    if chart.name in _KEPT:
        for each in chart.series:
            if each.label in _KEPT[chart.name]:
                form = "thin" if each.label == "training" else each.form
                label = f"{run}{_KEPT[chart.name][each.label]}"
                yield replace(each, label=label, colour=colour, form=form)
    elif chart.series:
        total = pl.concat([each.rows for each in chart.series]).group_by("step").agg(pl.col("value").sum())
        yield Series(run, colour, total.sort("step"))


def compare_problems(first: RunFolder, second: RunFolder) -> pl.DataFrame:
    """Join the last evaluations of two runs by problem.

    Returns:
        Columns example_id, env, kind (greedy, sampled), a and b (mean rewards), difference b - a, first and second (id of one of the
        trajectories), largest difference first.
    """
    a, b = (_read_last(folder) for folder in (first, second))
    joined = a.join(b, on=["example_id", "env", "kind"], suffix="_b", maintain_order="left")
    return joined.select(
        "example_id",
        "env",
        "kind",
        pl.col("reward").alias("a"),
        pl.col("reward_b").alias("b"),
        (pl.col("reward_b") - pl.col("reward")).alias("difference"),
        pl.col("trajectory_id").alias("first"),
        pl.col("trajectory_id_b").alias("second"),
    ).sort(pl.col("difference").abs(), descending=True, maintain_order=True)


def _read_last(folder: RunFolder) -> pl.DataFrame:
    versions: Sequence[int] = list_steps(folder, "evaluations")
    rows = scan(folder, "evaluations", _ANSWERS, version=versions[-1] if versions else 0)
    kind = pl.when("greedy").then(pl.lit("greedy")).otherwise(pl.lit("sampled")).alias("kind")
    # An answer without a reward counts as 0, as in the mean of an evaluation.
    return (
        rows.with_columns(pl.col("reward").fill_nan(0.0), kind)
        .group_by("example_id", "env", "kind", maintain_order=True)
        .agg(pl.col("reward").mean(), pl.col("trajectory_id").first())
        .collect()
    )
