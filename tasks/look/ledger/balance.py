"""Compare generation time with training time, and say how to balance them."""

import math
from dataclasses import dataclass

import polars as pl

from rollmill.tasks.look.ledger.span_timeline import COLLECTING, FLOW, RANK
from rollmill.tasks.look.ledger.step_attribution import Ledger, is_work, median_seconds
from rollmill.tasks.look.tables.view import count_noun

EVEN = 1.1
"""Ratio up to which two times count as equal."""


@dataclass(frozen=True, slots=True)
class Balance:
    """Comparison of generation time with training time, each the median over the steps.

    Attributes:
        generation_s: seconds in which a server generates, averaged over the servers.
        training_s: seconds in which a rank trains or sends weights, averaged over the ranks.
        n_servers: largest number of servers in a step.
        n_ranks: largest number of ranks in a step.
        is_overlapping: True if rollouts of a step run while the previous step is trained.
        imbalance: work of the busiest rank divided by the mean over the ranks.
    """

    generation_s: float
    training_s: float
    n_servers: int
    n_ranks: int
    is_overlapping: bool
    imbalance: float = 1.0

    @property
    def ratio(self) -> float:
        """Generation time divided by training time."""
        return self.generation_s / self.training_s

    @property
    def hint(self) -> str:
        """Sentence that compares generation with training time, with the number of servers or ranks that would make them equal."""
        uneven = f"; the busiest rank works {self.imbalance:.1f} times as long as the mean one"
        uneven = uneven if self.imbalance > EVEN else ""
        longer, shorter = ("generation", "training") if self.ratio >= 1 else ("training", "generation")
        ratio = max(self.ratio, 1 / self.ratio)
        if ratio < EVEN:
            return f"generation takes about as long as training{uneven}"
        if self.ratio > 1:
            more = math.ceil(self.n_servers * self.ratio) - self.n_servers
            remedy = f"{count_noun(more, 'more server')} would make them even"
        else:
            more = math.ceil(self.n_ranks * ratio) - self.n_ranks
            remedy = f"{count_noun(more, 'more rank')} would make them even"
            spare = self.n_servers - max(1, math.ceil(self.n_servers * self.ratio))
            # Without overlap servers and trainer wait for each other, and fewer servers would make the step longer.
            if spare and self.is_overlapping:
                remedy += f", and {count_noun(spare, 'server')} could go"
        return f"{longer} takes {ratio:.1f} times as long as {shorter}: {remedy}{uneven}"


def find_overlapping_steps(ledger: Ledger) -> pl.DataFrame:
    """Return the steps (column `step`) whose training began after the first rollouts of the next step had begun."""
    rollouts = ledger.episodes.filter(pl.col("use") == COLLECTING)
    # `step - 1` is the step whose training the rollouts of `step` may overlap.
    began = rollouts.group_by(pl.col("step") - 1).agg(pl.col("start").min().alias("began"))
    trained = ledger.path.filter(pl.col("phase") == "train").group_by("step").agg(pl.col("start").min())
    return trained.join(began, on="step").filter(pl.col("began") < pl.col("start")).select("step")


def measure_balance(ledger: Ledger) -> Balance | None:
    """Compute median generation and training times of the steps; None if no server generated or no rank worked."""
    is_rank, is_flow = pl.col("process").str.starts_with(RANK), pl.col("process") == FLOW
    us, there = pl.col("us").sum(), ledger.there
    # The flow's lanes report generation by trajectory, many at once; a server's own line counts each second once.
    generated = (
        ledger.owners.filter((pl.col("name") == "generating") & ~is_flow)
        .group_by("step")
        .agg(us)
        .join(there, on="step")
        .select(us=pl.col("us") / pl.col("n_servers"))
    )
    trained = (
        ledger.owners.filter(is_rank & is_work())
        .group_by("step", "process")
        .agg(us)
        .group_by("step")
        .agg(us, busiest=pl.col("us").max())
        .join(there, on="step")
        .select("busiest", us=pl.col("us") / pl.col("n_ranks"))
    )
    if not len(generated) or not len(trained):
        return None
    imbalance = trained.select((pl.col("busiest") / pl.col("us")).median()).item()
    is_overlapping = not find_overlapping_steps(ledger).is_empty()
    n_servers, n_ranks = (max(there[name].to_list(), default=0) for name in ("n_servers", "n_ranks"))
    return Balance(
        median_seconds(generated), median_seconds(trained), n_servers, n_ranks, is_overlapping, imbalance
    )
