"""A run of ours, and how long its steps were."""

import asyncio
import statistics
from dataclasses import dataclass

import polars as pl

from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan

PARTS = ("collect", "train", "sync")


@dataclass(frozen=True, slots=True)
class Race:
    """What came of it.

    Attributes:
        step_s: seconds from one step's first request to the next one's, for all but the last.
        held_out: rewards of one sampled answer to each held-out problem, before and after; empty without.
        parts_s: of ours, median seconds of the parts of a step.
        tokens: of a step's completions, in the mean.
    """

    step_s: list[float]
    held_out: list[float]
    tokens: float
    parts_s: dict[str, float]

    def least_s(self, settling: int) -> float:
        """Seconds of the quickest step but the first few: what others on the machine cost is in all the rest."""
        return min(self.step_s[settling:])

    def median_s(self, settling: int) -> float:
        """Seconds of a step in the middle."""
        return statistics.median(self.step_s[settling:])


def race(name: str, config: RunConfig) -> Race:
    """Post-train in a new folder."""
    from rollmill.flows.checks.preflight import preflight
    from rollmill.flows.post_train import post_train  # Prefect reads its settings when it is imported
    from rollmill.flows.run.folder import run_folder

    preflight(config)
    asyncio.run(post_train(name, config))
    return read(run_folder(name, config), config.evaluate.every > 0)


def read(folder: RunFolder, is_evaluated: bool) -> Race:
    """Return what a finished run stored of its steps."""
    from rollmill.tasks.look.tables.run_tables import read_held_out

    rows = scan(folder, "rollouts", ["step", "started_at", "n_completion_tokens"])
    by_step = rows.group_by("step").agg(pl.col("started_at").min(), pl.col("n_completion_tokens").sum())
    steps = by_step.sort("step").collect()
    seconds = steps["started_at"].diff().drop_nulls().dt.total_microseconds() / 1e6
    parts = scan(folder, "metrics", ["step", "name", "value"]).filter(
        pl.col("name").is_in([f"time/{part}_s" for part in PARTS])
    )
    medians = dict(parts.group_by("name").agg(pl.col("value").median()).collect().iter_rows())
    return Race(
        step_s=seconds.to_list(),
        held_out=read_held_out(folder)["reward"].to_list() if is_evaluated else [],
        tokens=statistics.mean(steps["n_completion_tokens"]),
        parts_s={part: medians[f"time/{part}_s"] for part in PARTS},
    )
