"""How imported conversations change from one cycle of an improvement to the next."""

import math
from collections.abc import Sequence

import polars as pl

from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.look.tables.run_tables import MIN_NORMAL, Z
from rollmill.tasks.look.tables.view import Column, View
from rollmill.tasks.store.folders import RunFolder

_COLUMNS = (
    Column("cycle"),
    Column("n", header="conversations"),
    Column("reward"),
    Column("reward_change", header="change"),
    Column("reward_error", header="±", rank=1),
    Column("tokens", digits=1),
    Column("tokens_change", header="change", digits=1),
    Column("tokens_error", header="±", digits=1, rank=1),
    Column("cut", rank=2),
    Column("new_prompts", header="new prompts", rank=2),
)
_FIGURES = ("reward", "tokens")
_MEANS = (*_FIGURES, "cut")


def make_drift_view(logs: RunFolder, ends: Sequence[int]) -> View:
    """Return a table with one row for each cycle: what its conversations are like, and how they differ from the cycle before.

    Changes have 95 % intervals (Welch's standard error); one that does not contain 0 is marked in the notes.

    Args:
        logs: the run that conversations are imported to.
        ends: the number of imported steps at the end of each cycle, ascending.
    """
    frame = (
        RunFrames([logs])
        .trajectories.select(
            "step",
            "group",
            "example_id",
            "reward",
            pl.col("n_completion_tokens").alias("tokens"),
            (pl.col("finish_reason") == "length").alias("cut"),
        )
        .group_by("step", "example_id")
        .agg(
            pl.len().alias("n"),
            *(pl.col(name).cast(pl.Float64).drop_nans().sum() for name in _MEANS),
            *(pl.col(name).cast(pl.Float64).drop_nans().count().alias(f"n_{name}") for name in _MEANS),
        )
        .collect()
    )
    rows: list[dict[str, object]] = []
    seen: set[str] = set()
    before, begin = frame.clear().select("example_id", "n", *_MEANS), 0
    for end in ends:
        of_cycle = frame.filter(pl.col("step").is_between(begin, end, closed="left"))
        # Answers to one prompt are alike, and a prompt may have several groups: intervals count prompts.
        sums = of_cycle.group_by("example_id").sum()
        means = (
            pl.when(pl.col(f"n_{name}") > 0).then(pl.col(name) / pl.col(f"n_{name}")).alias(name)
            for name in _MEANS
        )
        now = sums.select("example_id", "n", *means)
        prompts = set(now["example_id"])
        row: dict[str, object] = {
            "cycle": end,
            "n": int(now["n"].sum()),
            "cut": _mean(now["cut"].drop_nulls()),
            "new_prompts": len(prompts - seen) / len(prompts) if prompts else math.nan,
        }
        for name in _FIGURES:
            row |= _compare(name, before[name].drop_nulls(), now[name].drop_nulls())
        rows.append(row)
        seen |= prompts
        before, begin = now, end
    notes = [
        f"cycle {row['cycle']}: {name} differs from the cycle before"
        for row in rows
        for name in _FIGURES
        if abs(float(str(row[f"{name}_change"]))) > float(str(row[f"{name}_error"]))
    ]
    return View({"cycles": rows}, f"{logs.location}: imported conversations by cycle", _COLUMNS, rows, notes)


def _compare(name: str, before: pl.Series, now: pl.Series) -> dict[str, object]:
    """Return mean, change from `before`, and half of the change's 95 % interval; NaN where there are few values."""
    means = [_mean(before), _mean(now)]
    samples = (each.to_numpy() for each in (before, now))
    variance = sum(each.var(ddof=1) / len(each) if len(each) >= MIN_NORMAL else math.nan for each in samples)
    return {
        name: means[1],
        f"{name}_change": means[1] - means[0],
        f"{name}_error": Z * math.sqrt(variance),
    }


def _mean(values: pl.Series) -> float:
    return float(values.to_numpy().mean()) if len(values) else math.nan
