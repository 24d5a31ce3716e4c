"""The table of costs: what servers, ranks and scorers did, by environment and by what became of the trajectories."""

import polars as pl

from rollmill.tasks.look.ledger.run_ledger import read_ledger
from rollmill.tasks.look.ledger.span_timeline import SECOND_US
from rollmill.tasks.look.ledger.step_attribution import Ledger
from rollmill.tasks.look.tables.costs import EVALUATION, OPEN, TRAINED
from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.look.tables.selection import Selection, check_known
from rollmill.tasks.look.tables.view import Column, View, count_noun, drop_uniform, limit_notes, order_rows
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest

PERCENT = 100.0
HOUR_S = 3600.0
LEAST_SHOWN_S = 0.05
"""Seconds below which what was done for no trajectory is not shown."""
COST_COLUMNS = (
    Column("fate", is_text=True),
    Column("env"),
    Column("trajectories", rank=2),
    Column("tokens", rank=4),
    Column("server_s", header="server s", digits=1),
    Column("trainer_s", header="rank s", digits=1),
    Column("scorer_s", rank=5, header="scorer s", digits=1),
    Column("percent", header="% of all", rank=1, digits=1),
    Column("price", digits=4),
)


def select_costs_view(folder: RunFolder, selection: Selection) -> View:
    """Return the table of `rollmill inspect --costs`.

    Raises:
        ConfigError: the run has no spans of these steps, or no such environment or column.
    """
    selection.check()
    return make_costs_view(folder, read_ledger(folder, selection.steps), selection)


def make_costs_view(folder: RunFolder, ledger: Ledger, selection: Selection | None = None) -> View:
    """Return the table of costs in the steps of a ledger: the largest first, those of no trajectory last."""
    selection = selection or Selection()
    frames = RunFrames([folder])
    costs = frames.measure_costs(folder, ledger)
    n_answers = frames.dataset("evaluations").select(pl.col("trajectory_id").n_unique()).collect().item()
    n_outside = n_answers - len(costs.filter(pl.col("fate") == EVALUATION))
    whole_s = float(costs.select(pl.col("server_s", "trainer_s").sum().round(6)).sum_horizontal().item())
    if selection.env:
        check_known("--env", selection.env, costs["env"].drop_nulls())
        costs = costs.filter(pl.col("env") == selection.env)
    price = float(read_manifest(folder).config.get("observe", {}).get("price_per_hour", 0.0))
    used = pl.col("server_s") + pl.col("trainer_s")
    is_of_none = pl.col("fate").str.starts_with("(")
    table = (
        costs.group_by("fate", "env")
        .agg(
            pl.col("trajectory").count().cast(pl.Int64).alias("trajectories"),
            pl.col("n_completion_tokens").sum().alias("tokens"),
            pl.col("server_s", "trainer_s", "scorer_s").sum(),
        )
        .with_columns(
            percent=PERCENT * used / (whole_s or 1.0), price=used / HOUR_S * price if price else None
        )
        .sort(is_of_none, used, "fate", "env", descending=[False, True, False, False])
    )
    table = table.filter((pl.col("trajectories") > 0) | (used >= LEAST_SHOWN_S))
    rows = order_rows(table, COST_COLUMNS, selection.sort, selection.limit or 0).to_dicts()
    columns = drop_uniform(COST_COLUMNS, rows, (), ("price",))
    if table["env"].drop_nulls().n_unique() < 2:
        columns = [column for column in columns if column.name != "env"]
    steps_s = float(ledger.steps["us"].sum()) / SECOND_US
    values = {"run": folder.location, "seconds": steps_s, "process_seconds": whole_s, "costs": rows}
    notes = [
        f"{count_noun(len(ledger.steps), 'step')} took {steps_s:.1f} s; servers and ranks together had {whole_s:.1f} s",
        *_describe_unused(costs),
        *(
            [f"{n_outside} of {count_noun(n_answers, 'held-out answer')} are of other times"]
            if n_outside
            else []
        ),
        *limit_notes(len(rows), len(table)),
    ]
    return View(values, f"{folder.name}, what it cost", columns, rows, notes)


def _describe_unused(costs: pl.DataFrame) -> list[str]:
    """Return the note of which share of the servers' seconds made trajectories that were not trained on; empty without any."""
    sampled = costs.filter(pl.col("trajectory").is_not_null(), ~pl.col("fate").is_in([EVALUATION, OPEN]))
    whole_s = float(sampled["server_s"].sum())
    if not whole_s:
        return []
    share = float(sampled.filter(pl.col("fate") != TRAINED)["server_s"].sum()) / whole_s
    return [f"of the servers' seconds that made trajectories, {share:.1%} went to ones not trained on"]
