"""Where the time of steps went, as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import polars as pl

from flows.looking.view import Column, View, counted
from tasks.observe.ledger.attribution import Ledger, is_work, median_s
from tasks.observe.ledger.balance import balance_of
from tasks.observe.ledger.shortening import savings
from tasks.observe.ledger.timeline import FLOW, SECOND_US, UNATTRIBUTED, is_server, is_trainer

OTHERS, PATH = "(others)", "critical path"
PERCENT = 100.0
MOST_SEGMENTS = 40
"""Segments of one step's critical path that are listed: the longest."""
LEAST_SHARE = 0.005
"""What took less of a step's time is one row of a table, together."""
SHARE = Column("percent", rank=1, header="% of step", digits=1)
SECONDS = Column("seconds")


def ledger_views(name: str, ledger: Ledger) -> list[View]:
    """The tables of a ledger: the step's line, the other processes, trajectories, the path of a single step, advice."""
    n = len(ledger.steps)
    if not n:
        return _ends(name, ledger)
    views = [View({}, f"{name}, {_length(ledger)}, by what decided it", *_line(ledger))]
    if others := processes(ledger):
        columns = [Column("process"), Column("name"), Column("cause", is_text=True), SECONDS, SHARE]
        if compared := slowest(ledger):
            columns += [Column("most", rank=2), Column("spread", rank=2), Column("by", rank=3, is_text=True)]
        views.append(View({}, "ranks of the trainer, and servers", columns, _shown(others), compared))
    if each := trajectories(ledger):
        columns = [Column("name"), SECONDS, Column("percent", header="% of it", digits=1)]
        views.append(View({}, "one trajectory, on average", columns, _shown(each, is_all=False)))
    if n == 1:
        views.append(_path(ledger))
    return [*views, _advice(ledger), *_ends("the run", ledger)]


def ledger_values(name: str, ledger: Ledger) -> dict[str, object]:
    """The same as JSON values, with every step's seconds and the critical paths whole."""
    balance = balance_of(ledger)
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
        "median_step_s": median_s(ledger.steps),
        "steps": ledger.steps.select(seconds).join(ledger.there, on="step", maintain_order="left").to_dicts(),
        "line": step_line(ledger),
        "processes": processes(ledger),
        "trajectory": trajectories(ledger),
        "owners": ledger.owners.select(seconds).to_dicts(),
        "critical_path": path.to_dicts(),
        "ends": run_ends(ledger),
        "savings": [asdict(each) for each in savings(ledger)],
        "balance": asdict(balance) | {"ratio": balance.ratio, "hint": balance.hint} if balance else None,
    }


def step_line(ledger: Ledger) -> list[dict[str, object]]:
    """name, cause, seconds (mean over steps), share (of all steps' time): of the step's line, the largest first."""
    line = ledger.owners.filter(pl.col("process") == FLOW)
    return _by_share(_means(line, ledger.steps, ["name", "cause"]))


def processes(ledger: Ledger) -> list[dict[str, object]]:
    """The same of ranks and servers, each kind together, over the steps in which there were some.

    process, name, cause, seconds (mean over those of the kind that were there in a step), share, most (that one of them had in
    a step), by (who had most of it in all), spread (most less least).
    """
    kind = pl.col("process").map_elements(lambda each: _kind(str(each)), pl.String)
    others = ledger.owners.filter(pl.col("process") != FLOW).with_columns(kind.alias("kind"))
    found: list[dict[str, object]] = []
    for (kind_name,), rows in others.group_by("kind", maintain_order=True):
        label = _label(str(kind_name), rows)
        found += [{"process": label} | row for row in _by_share(_of_kind(ledger, rows))]
    return found


def trajectories(ledger: Ledger) -> list[dict[str, object]]:
    """name, seconds, share: of a trajectory's time, on average over all of them."""
    own = ledger.trajectories
    n = max(1, own.select("step", "lane").n_unique())
    whole = float(own["us"].sum() or 1)
    by = own.group_by("name").agg(
        (pl.col("us").sum() / n / SECOND_US).alias("seconds"), (pl.col("us").sum() / whole).alias("share")
    )
    return _by_share(by)


def run_ends(ledger: Ledger) -> list[dict[str, object]]:
    """Part (`start`, `end`), name, cause, seconds, share (of that part): what the run took beside its steps."""
    us = pl.col("us")
    by = ledger.ends.with_columns(
        (us / SECOND_US).alias("seconds"), (us / us.sum().over("part")).alias("share")
    )
    return by.select("part", "name", "cause", "seconds", "share").to_dicts()


def slowest(ledger: Ledger) -> list[str]:
    """Of ranks and of servers that are several: which was at work longest, and by how much, in a line each."""
    on = ["step", "process"]
    works = ledger.owners.filter(is_work()).group_by(on).agg(pl.col("us").sum())
    there = ledger.owners.select(on).unique().join(works, on=on, how="left")
    kind = pl.col("process").map_elements(lambda each: _kind(str(each)), pl.String)
    busy = there.select("step", "process", kind.alias("kind"), pl.col("us").fill_null(0))
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


def path_shares(ledger: Ledger) -> dict[str, float]:
    """What part of the critical paths each name has, the largest first."""
    length = (pl.col("end") - pl.col("start")).sum()
    by = ledger.path.group_by("name").agg(length.alias("us")).sort("us", "name", descending=[True, False])
    return dict(zip(by["name"], (by["us"] / max(1, int(by["us"].sum()))).to_list(), strict=True))


def _length(ledger: Ledger) -> str:
    """Which steps these are, and how long they took."""
    n, mean = len(ledger.steps), _mean_s(ledger.steps)
    if n == 1:
        return f"step {ledger.steps['step'][0]}: {mean:.2f} s"
    return f"mean of {n} steps: {mean:.2f} s (median {median_s(ledger.steps):.2f} s)"


def _mean_s(frame: pl.DataFrame) -> float:
    """The mean of a frame's microseconds, in seconds; 0 without rows."""
    return float(frame.select(pl.col("us").mean() / SECOND_US).item() or 0.0)


def _kind(process: str) -> str:
    return "rank" if is_trainer(process) else "server" if is_server(process) else process


def _label(kind: str, owners: pl.DataFrame) -> str:
    """How many of a kind were there at once: `2 servers`, or `1 to 2 servers` where that changed from step to step."""
    n = owners.group_by("step").agg(pl.col("process").n_unique())["process"].to_list()
    if max(n) == 1:
        return kind
    return f"{min(n)} to {max(n)} {kind}s" if min(n) < max(n) else f"{max(n)} {kind}s"


def _of_kind(ledger: Ledger, owners: pl.DataFrame) -> pl.DataFrame:
    """name, cause, seconds, share, most, spread, by: of all ranks, or of all servers."""
    us, keys = pl.col("us"), ["name", "cause"]
    name = pl.when("is_other").then(pl.col("name") + ", other step").otherwise("name").alias("name")
    own = owners.with_columns(name).group_by("step", "process", *keys).agg(us.sum())
    there = own.group_by("step").agg(pl.col("process").n_unique().alias("n"))
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
    """Of each key: seconds, the mean over steps, where those without it have none; and the share of all of their time."""
    us = pl.col("us").sum()
    n, whole = max(1, len(steps)), float(steps["us"].sum() or 1)
    return owners.group_by(by).agg((us / n / SECOND_US).alias("seconds"), (us / whole).alias("share"))


def _by_share(frame: pl.DataFrame) -> list[dict[str, object]]:
    keys = [name for name in ("name", "cause") if name in frame.columns]
    return frame.sort(["share", *keys], descending=[True, *(False for _ in keys)]).to_dicts()


def _shown(
    rows: Sequence[Mapping[str, Any]], of: str = "process", *, is_all: bool = True
) -> list[dict[str, object]]:
    """Rows as they are read; those of less than LEAST_SHARE are one for each process, or whatever they are of.

    Where they are all of somebody's time, `unattributed` is one row of its own, whatever was done meanwhile, also of 0 s.
    """
    shown: list[dict[str, object]] = []
    for whose, group in groupby(rows, key=lambda row: row.get(of)):
        listed = [dict(row) | {"percent": PERCENT * row["share"]} for row in group]
        if is_all:
            left = [row for row in listed if row["name"] == UNATTRIBUTED]
            numbers = [name for name, value in listed[0].items() if isinstance(value, float)]
            sums = {name: sum((row[name] for row in left), 0.0) for name in numbers}
            one = left[0] | {"cause": ""} if left else dict.fromkeys(listed[0], "") | {of: whose}
            listed = [row for row in listed if row not in left] + [one | {"name": UNATTRIBUTED} | sums]
            listed.sort(key=lambda row: -row["share"])
        own = [row for row in listed if row["share"] >= LEAST_SHARE or row["name"] == UNATTRIBUTED]
        small = [row for row in listed if row not in own]
        sums = {name: sum(row[name] for row in small) for name in ("seconds", "percent")}
        shown += own
        if any(round(sums[column.name], column.digits) for column in (SECONDS, SHARE)):
            shown.append(dict.fromkeys(small[0]) | {of: whose, "name": OTHERS} | sums)
    return shown


def _line(ledger: Ledger) -> tuple[list[Column], list[dict[str, object]], list[str]]:
    columns = [Column("name"), Column("cause", header="meanwhile, or for", is_text=True), SECONDS, SHARE]
    shares = [f"{name} {share:.0%}" for name, share in path_shares(ledger).items() if share >= 0.01]
    notes = [f"critical path: {', '.join(shares)}"]
    if len(ledger.steps) > 1:
        step, us = ledger.steps.sort("us", descending=True).row(0)
        share = us / ledger.steps["us"].sum()
        notes.append(f"longest: step {step}, {us / SECOND_US:.2f} s, {share:.0%} of the time of all")
    return columns, _shown(step_line(ledger)), notes


def _path(ledger: Ledger) -> View:
    """The segments of one step's critical path, in order."""
    rows = ledger.path.with_columns(
        ((pl.col("start") - pl.col("start").min()) / SECOND_US).alias("from"),
        ((pl.col("end") - pl.col("start")) / SECOND_US).alias("seconds"),
    )
    longest = rows.top_k(MOST_SEGMENTS, by="seconds").sort("from")
    left = len(rows) - len(longest)
    notes = [f"{counted(left, 'shorter segment')} left out; --json has all"] if left else []
    columns = [
        Column("from"),
        SECONDS,
        Column("phase", rank=2),
        Column("name"),
        Column("process", is_text=True),
    ]
    columns += [Column("lane", rank=1), Column("cause", rank=3, is_text=True)]
    return View({}, PATH, columns, longest.select(column.name for column in columns).to_dicts(), notes)


def _ends(name: str, ledger: Ledger) -> list[View]:
    """What a run took beside its steps; nothing where that was not asked for."""
    columns = [Column("part"), Column("name"), Column("cause", is_text=True), SECONDS]
    columns.append(Column("percent", header="% of it", digits=1))
    ends = _shown(run_ends(ledger), "part")
    return [View({}, f"{name}, its start and end, beside its steps", columns, ends)] if ends else []


def _advice(ledger: Ledger) -> View:
    """What would shorten the step, and the balance of generation to training."""
    balance = balance_of(ledger)
    rows = [{"remedy": each.remedy, "seconds": each.seconds} for each in savings(ledger)]
    columns = [Column("remedy", is_text=True), Column("seconds", header="saves up to")]
    return View({}, "what would shorten a step", columns, rows, [balance.hint] if balance else [])
