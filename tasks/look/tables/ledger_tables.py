"""Tables of where the time of steps went."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import polars as pl

from rollmill.tasks.look.ledger.balance import measure_balance
from rollmill.tasks.look.ledger.span_timeline import FLOW, RANK, SECOND_US, UNATTRIBUTED
from rollmill.tasks.look.ledger.step_attribution import Ledger, is_work, median_seconds
from rollmill.tasks.look.ledger.what_if import estimate_savings
from rollmill.tasks.look.tables.view import Column, View, count_noun

OTHERS, PATH = "(others)", "critical path"
PERCENT = 100.0
MOST_SEGMENTS = 40
"""Number of segments of a critical path to list, longest first."""
LEAST_SHARE = 0.005
"""Owners below this share of a step's time are merged into one row."""
MOST_OWNERS = 10
"""Number of names that the stacked bars of steps distinguish."""
LEAST_ON_PATH = 0.01
"""Smallest share of the critical paths that the note below the step names."""
SHARE = Column("percent", rank=1, header="% of step", digits=1)
SECONDS = Column("seconds")


def make_ledger_views(name: str, ledger: Ledger) -> list[View]:
    """Return tables of where time went: step lane, ranks and servers, trajectories, a single step's path, and advice."""
    n = len(ledger.steps)
    if not n:
        return _ends(name, ledger)
    mean_s, which = _mean_s(ledger.steps), f"step {ledger.steps['step'][0]}"
    length = f"{which}: {mean_s:.2f} s"
    if n > 1:
        # A single slow step moves the mean and not the median.
        length = f"mean of {n} steps: {mean_s:.2f} s (median {median_seconds(ledger.steps):.2f} s)"
    views = [View({}, f"{name}, {length}, by what decided it", *_line(ledger))]
    if others := processes(ledger):
        columns = [Column("process"), Column("name"), Column("cause", is_text=True), SECONDS, SHARE]
        if compared := slowest(ledger):
            columns += [Column("most", rank=2), Column("spread", rank=2), Column("by", rank=3, is_text=True)]
        views.append(View({}, "ranks of the trainer, and servers", columns, _limit_shown(others), compared))
    if each := trajectories(ledger):
        columns = [Column("name"), SECONDS, Column("percent", header="% of it", digits=1)]
        views.append(View({}, "one trajectory, on average", columns, _limit_shown(each)))
    if n == 1:
        views.append(_path(ledger))
    balance = measure_balance(ledger)
    savings = [{"remedy": each.remedy, "seconds": each.seconds} for each in estimate_savings(ledger)]
    columns = [Column("remedy", is_text=True), Column("seconds", header="saves up to")]
    hints = [balance.hint] if balance else []
    views.append(View({}, "what would shorten a step", columns, savings, hints))
    return [*views, *_ends("the run", ledger)]


def ledger_values(name: str, ledger: Ledger) -> dict[str, object]:
    """Return where time went as JSON values, with every step's seconds and complete critical path."""
    balance = measure_balance(ledger)
    seconds = [pl.exclude("us"), (pl.col("us") / SECOND_US).alias("seconds")]
    start = ledger.path.group_by("step").agg(pl.col("start").min().alias("from"))
    path = ledger.path.join(start, on="step", maintain_order="left").select(
        "step",
        ((pl.col("start") - pl.col("from")) / SECOND_US).alias("start_s"),
        ((pl.col("end") - pl.col("start")) / SECOND_US).alias("seconds"),
        pl.exclude("step", "start", "end", "from"),
    )
    return {
        "run": name,
        "step_s": _mean_s(ledger.steps),
        "median_step_s": median_seconds(ledger.steps),
        "steps": ledger.steps.select(seconds).join(ledger.there, on="step", maintain_order="left").to_dicts(),
        "line": step_line(ledger),
        "processes": processes(ledger),
        "trajectory": trajectories(ledger),
        "owners": ledger.owners.select(seconds).to_dicts(),
        "critical_path": path.to_dicts(),
        "ends": run_ends(ledger),
        "savings": [asdict(each) for each in estimate_savings(ledger)],
        "balance": asdict(balance) | {"ratio": balance.ratio, "hint": balance.hint} if balance else None,
    }


def step_line(ledger: Ledger) -> list[dict[str, object]]:
    """Return where the step lane's time went, largest first: name, cause, seconds (mean over steps), share of all time."""
    line = ledger.owners.filter(pl.col("process") == FLOW)
    return _by_share(_means(line, ledger.steps, ["name", "cause"]))


def sum_step_owners(path: pl.DataFrame) -> pl.DataFrame:
    """Return the seconds of each step by what is on its critical path; `path` has the critical paths of some steps.

    Returns:
        Columns step, name, seconds. The rows of a step sum to its duration. Names are in order of their seconds in all steps;
        those after the first MOST_OWNERS are together, as OTHERS.
    """
    seconds = ((pl.col("end") - pl.col("start")).sum() / SECOND_US).alias("seconds")
    totals = path.group_by("name").agg(seconds).sort("seconds", "name", descending=[True, False])
    names = totals["name"].head(MOST_OWNERS).to_list()
    name = pl.when(pl.col("name").is_in(names)).then("name").otherwise(pl.lit(OTHERS)).alias("name")
    found = path.with_columns(name).group_by("step", "name").agg(seconds)
    order = pl.DataFrame({"name": [*names, OTHERS]}).with_row_index("place")
    return found.join(order, on="name").sort("place", "step").select("step", "name", "seconds")


def processes(ledger: Ledger) -> list[dict[str, object]]:
    """Return where the time of ranks and of servers went, each kind together, over the steps in which it existed.

    Keys: process, name, cause, seconds (mean over the processes of the kind in a step), share, most (largest value of one process
    in a step), by (process with the largest sum), spread (largest minus smallest value).
    """
    others = ledger.owners.filter(pl.col("process") != FLOW).with_columns(_kind())
    found: list[dict[str, object]] = []
    for (kind,), rows in others.group_by("kind", maintain_order=True):
        n = rows.group_by("step").agg(pl.col("process").n_unique())["process"].to_list()
        # Servers may join or be lost between steps.
        counts = f"{min(n)} to {max(n)}" if min(n) < max(n) else f"{max(n)}"
        label = kind if max(n) == 1 else f"{counts} {kind}s"
        found += [{"process": label} | row for row in _by_share(_sum_kind(ledger, rows))]
    return found


def trajectories(ledger: Ledger) -> list[dict[str, object]]:
    """Return where a trajectory's time went, averaged over all: rows with name, seconds and share, largest first."""
    own = ledger.trajectories
    n = max(1, own.select("step", "lane").n_unique())
    whole = float(own["us"].sum() or 1)
    by = own.group_by("name").agg(
        (pl.col("us").sum() / n / SECOND_US).alias("seconds"), (pl.col("us").sum() / whole).alias("share")
    )
    return _by_share(by)


def run_ends(ledger: Ledger) -> list[dict[str, object]]:
    """Return where the time before and after the steps went: part (`start`, `end`), name, cause, seconds, share of the part."""
    us = pl.col("us")
    by = ledger.ends.with_columns(
        (us / SECOND_US).alias("seconds"), (us / us.sum().over("part")).alias("share")
    )
    return by.select("part", "name", "cause", "seconds", "share").to_dicts()


def slowest(ledger: Ledger) -> list[str]:
    """Return a line for ranks and one for servers, where there are several: which worked longest, and by how much."""
    on = ["step", "process"]
    works = ledger.owners.filter(is_work()).group_by(on).agg(pl.col("us").sum())
    there = ledger.owners.select(on).unique().join(works, on=on, how="left")
    # A process that only waited has no row among the works, and is the least busy one.
    busy = there.select("step", "process", _kind(), pl.col("us").fill_null(0))
    lines = []
    for name in ("rank", "server"):
        together = busy.filter(pl.col("kind") == name, pl.len().over("step", "kind") > 1)
        more = (pl.col("us") - pl.col("us").min().over("step")).alias("more")
        means = together.with_columns(more).group_by("process").agg(pl.col("us", "more").mean() / SECOND_US)
        for process, most, more_s in means.sort("us", "process", descending=True).head(1).rows():
            lines.append(
                f"busiest {name}: {process}, {most:.2f} s of a step, {more_s:.2f} s more than the least busy"
            )
    return lines


def _mean_s(frame: pl.DataFrame) -> float:
    """Return the mean of a frame's column `us` in seconds; 0 without rows."""
    return float(frame.select(pl.col("us").mean() / SECOND_US).item() or 0.0)


def _kind() -> pl.Expr:
    """Return an expression that gives `kind` for column `process`: rank, server, or flow."""
    process = pl.col("process")
    is_rank, is_flow = process.str.starts_with(RANK), process == FLOW
    other = pl.when(is_flow).then(pl.lit(FLOW)).otherwise(pl.lit("server"))
    return pl.when(is_rank).then(pl.lit("rank")).otherwise(other).alias("kind")


def _sum_kind(ledger: Ledger, owners: pl.DataFrame) -> pl.DataFrame:
    """Compute columns name, cause, seconds, share, most, spread, by for all ranks, or all servers; see `processes`."""
    us, keys = pl.col("us"), ["name", "cause"]
    name = pl.when("is_other").then(pl.col("name") + ", other step").otherwise("name").alias("name")
    own = owners.with_columns(name).group_by("step", "process", *keys).agg(us.sum())
    there = own.group_by("step").agg(pl.col("process").n_unique().alias("n"))
    # A process of the step without such a row had 0 s of it.
    least = pl.when(pl.len() < pl.col("n").first()).then(0).otherwise(us.min())
    per_step = (
        own.join(there, on="step")
        .group_by("step", *keys)
        .agg(us.sum() / pl.col("n").first(), most=us.max(), spread=us.max() - least)
    )
    totals = own.group_by("process", *keys).agg(us.sum()).sort("us", "process", descending=[True, False])
    by = totals.group_by(keys, maintain_order=True).agg(pl.col("process").first().alias("by"))
    per_second = len(there) * SECOND_US
    extremes = per_step.group_by(keys).agg(pl.col("most", "spread").sum() / per_second)
    means = _means(per_step, ledger.steps.join(there, on="step"), keys)
    return means.join(extremes, on=keys).join(by, on=keys)


def _means(owners: pl.DataFrame, steps: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Return seconds (mean over `steps`, 0 where a key is missing) and share of all steps' time for each key in `by`."""
    us = pl.col("us").sum()
    n, whole = max(1, len(steps)), float(steps["us"].sum() or 1)
    return owners.group_by(by).agg((us / n / SECOND_US).alias("seconds"), (us / whole).alias("share"))


def _by_share(frame: pl.DataFrame) -> list[dict[str, object]]:
    keys = [name for name in ("name", "cause") if name in frame.columns]
    return frame.sort(["share", *keys], descending=[True, *(False for _ in keys)]).to_dicts()


def _limit_shown(rows: Sequence[Mapping[str, Any]], of: str = "process") -> list[dict[str, object]]:
    """Limit rows for display: for each value of `of`, those below LEAST_SHARE are merged into one, and those of unattributed time."""
    shown: list[dict[str, object]] = []
    for _, group in groupby(rows, key=lambda row: row.get(of)):
        listed = [dict(row) | {"percent": PERCENT * row["share"]} for row in group]
        # Several causes of unattributed time would be as many rows that explain nothing.
        left = [row for row in listed if row["name"] == UNATTRIBUTED]
        small = [row for row in listed if row["share"] < LEAST_SHARE and row not in left]
        own = [row for row in listed if row not in small and row not in left]
        own += _merge(left, UNATTRIBUTED)
        shown += [*sorted(own, key=lambda row: -row["share"]), *_merge(small, OTHERS)]
    return shown


def _merge(rows: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the sum of rows as a list of one row with this name; empty if its time and its share would be shown as 0."""
    sums = {key: sum((row[key] for row in rows), 0.0) for key in ("seconds", "share", "percent")}
    if not any(round(sums[column.name], column.digits) for column in (SECONDS, SHARE)):
        return []
    kept = {key: value for key, value in rows[0].items() if key in ("process", "part")}
    return [dict.fromkeys(rows[0]) | kept | {"name": name, "cause": ""} | sums]


def _line(ledger: Ledger) -> tuple[list[Column], list[dict[str, object]], list[str]]:
    columns = [Column("name"), Column("cause", header="while", is_text=True), SECONDS, SHARE]
    us = (pl.col("end") - pl.col("start")).sum().alias("us")
    by = ledger.path.group_by("name").agg(us).sort("us", "name", descending=[True, False])
    shares = by.with_columns(share=pl.col("us") / pl.col("us").sum()).filter(pl.col("share") >= LEAST_ON_PATH)
    path = [f"{name} {share:.0%}" for name, share in shares.select("name", "share").rows()]
    notes = [f"critical path: {', '.join(path)}"]
    if len(ledger.steps) > 1:
        step, us = ledger.steps.sort("us", descending=True).row(0)
        share = us / ledger.steps["us"].sum()
        notes.append(f"longest: step {step}, {us / SECOND_US:.2f} s, {share:.0%} of all steps")
    return columns, _limit_shown(step_line(ledger)), notes


def _path(ledger: Ledger) -> View:
    """Return the table of one step's critical path in order of time, with at most MOST_SEGMENTS, the longest ones."""
    rows = ledger.path.with_columns(
        ((pl.col("start") - pl.col("start").min()) / SECOND_US).alias("from"),
        ((pl.col("end") - pl.col("start")) / SECOND_US).alias("seconds"),
    )
    longest = rows.top_k(MOST_SEGMENTS, by="seconds").sort("from")
    left = len(rows) - len(longest)
    notes = [f"{count_noun(left, 'shorter segment')} left out; --json has all"] if left else []
    columns = [Column("from"), SECONDS, Column("phase", rank=2), Column("name")]
    columns += [
        Column("process", is_text=True),
        Column("lane", rank=1),
        Column("cause", rank=3, is_text=True),
    ]
    return View({}, PATH, columns, longest.select(column.name for column in columns).to_dicts(), notes)


def _ends(name: str, ledger: Ledger) -> list[View]:
    """Return the table of the run's time before and after its steps, as a list; empty if the ledger has none."""
    columns = [Column("part"), Column("name"), Column("cause", is_text=True), SECONDS]
    columns.append(Column("percent", header="% of it", digits=1))
    ends = _limit_shown(run_ends(ledger), "part")
    return [View({}, f"{name}, its start and end, outside of its steps", columns, ends)] if ends else []
