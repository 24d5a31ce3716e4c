"""Generation against training: which of the two waits, and for what sizes neither would."""

import math
from dataclasses import dataclass

import polars as pl

from tasks.observe.ledger.attribution import Ledger, is_work, median_s
from tasks.observe.ledger.lanes import COLLECTING
from tasks.observe.ledger.timeline import FLOW, RANK

EVEN = 1.1
"""Ratio up to which two times are as good as the same."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The median step's generation and training.

    Attributes:
        generation_s: seconds that a server generates, on average over the servers.
        training_s: seconds that a rank is at work, in sending weights too, on average over the ranks.
        n_servers: most that were there in a step.
        n_ranks: likewise.
        is_overlapping: True when a step's rollouts go on while the one before is trained.
        imbalance: seconds of the busiest rank for each second of the mean one.
    """

    generation_s: float
    training_s: float
    n_servers: int
    n_ranks: int
    is_overlapping: bool
    imbalance: float = 1.0

    @property
    def ratio(self) -> float:
        """Seconds of generation for each second of training."""
        return self.generation_s / self.training_s

    @property
    def hint(self) -> str:
        """One sentence on sizes."""
        uneven = (
            f"; the busiest rank works {self.imbalance:.1f} times as long as the mean one"
            if self.imbalance > EVEN
            else ""
        )
        longer, shorter = ("generation", "training") if self.ratio >= 1 else ("training", "generation")
        ratio = max(self.ratio, 1 / self.ratio)
        if ratio < EVEN:
            return f"generation takes about as long as training{uneven}"
        if self.ratio > 1:
            more = math.ceil(self.n_servers * self.ratio) - self.n_servers
            remedy = f"{_counted(more, 'more server')} would make them even"
        else:
            more = math.ceil(self.n_ranks * ratio) - self.n_ranks
            remedy = f"{_counted(more, 'more rank')} would make them even"
            spare = self.n_servers - max(1, math.ceil(self.n_servers * self.ratio))
            remedy += f", and {_counted(spare, 'server')} could go" if spare and self.is_overlapping else ""
        return f"{longer} takes {ratio:.1f} times as long as {shorter}: {remedy}{uneven}"


def overlapping_steps(ledger: Ledger) -> pl.DataFrame:
    """The steps (step) that were trained while the next one's rollouts had begun, as with rollout.max_staleness."""
    rollouts = ledger.episodes.filter(pl.col("use") == COLLECTING)
    began = rollouts.group_by(pl.col("step") - 1).agg(pl.col("start").min().alias("began"))
    trained = ledger.path.filter(pl.col("phase") == "train").group_by("step").agg(pl.col("start").min())
    return trained.join(began, on="step").filter(pl.col("began") < pl.col("start")).select("step")


def balance_of(ledger: Ledger) -> Balance | None:
    """The balance of the median step; None without a server or without a trainer."""
    is_rank, is_flow = pl.col("process").str.starts_with(RANK), pl.col("process") == FLOW
    us, there = pl.col("us").sum(), ledger.there
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
    is_overlapping = not overlapping_steps(ledger).is_empty()
    n_servers, n_ranks = (max(there[name].to_list(), default=0) for name in ("n_servers", "n_ranks"))
    return Balance(median_s(generated), median_s(trained), n_servers, n_ranks, is_overlapping, imbalance)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
