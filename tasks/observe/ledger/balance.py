"""Generation against training: which of the two waits, and for what sizes neither would."""

import math
from dataclasses import dataclass

import polars as pl

from tasks.observe.ledger.attribution import Ledger, is_work, median_s
from tasks.observe.ledger.timeline import FLOW, is_server, is_trainer

EVEN = 1.1
"""Ratio up to which two times are as good as the same."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The median step's generation and training.

    Attributes:
        generation_s: seconds that a server generates, on average over the servers.
        training_s: seconds that the busiest rank is at work, in sending weights too.
        n_servers: of the run.
        n_ranks: of the trainer.
        is_overlapping: True when servers generate for another step than the one in hand.
    """

    generation_s: float
    training_s: float
    n_servers: int
    n_ranks: int
    is_overlapping: bool

    @property
    def ratio(self) -> float:
        """Seconds of generation for each second of training."""
        return self.generation_s / self.training_s

    @property
    def hint(self) -> str:
        """One sentence on sizes."""
        longer, shorter = ("generation", "training") if self.ratio >= 1 else ("training", "generation")
        ratio = max(self.ratio, 1 / self.ratio)
        if ratio < EVEN:
            said = "generation takes about as long as training"
            return said if self.is_overlapping else f"{said}; {self._overlap}"
        said = f"{longer} takes {ratio:.1f} times as long as {shorter}"
        if self.ratio > 1:
            more = math.ceil(self.n_servers * self.ratio) - self.n_servers
            remedy = f"{_counted(more, 'more server')} would make them even"
        else:
            more = math.ceil(self.n_ranks * ratio) - self.n_ranks
            remedy = f"{_counted(more, 'more rank')} would make them even"
            spare = self.n_servers - max(1, math.ceil(self.n_servers * self.ratio))
            remedy += f", and {_counted(spare, 'server')} could go" if spare and self.is_overlapping else ""
        return f"{said}: {remedy}" if self.is_overlapping else f"{said}: {remedy}; {self._overlap}"

    @property
    def _overlap(self) -> str:
        hidden = min(self.generation_s, self.training_s)
        return f"rollout.max_staleness: 1 would hide up to {hidden:.1f} s of a step"


def balance_of(ledger: Ledger) -> Balance | None:
    """The balance of the median step; None without a server or without a trainer."""
    owners = ledger.owners
    processes = owners["process"].unique().to_list()
    servers, ranks = (
        [each for each in processes if is_server(each)],
        [each for each in processes if is_trainer(each)],
    )
    us = pl.col("us").sum()
    generated = (
        owners.filter((pl.col("name") == "generating") & (pl.col("process") != FLOW))
        .group_by("step")
        .agg(us / max(1, len(servers)))
    )
    trained = (
        owners.filter(pl.col("process").is_in(ranks) & is_work())
        .group_by("step", "process")
        .agg(us)
        .group_by("step")
        .agg(pl.col("us").max())
    )
    if not len(generated) or not len(trained):
        return None
    return Balance(
        median_s(generated), median_s(trained), len(servers), len(ranks), bool(owners["is_other"].any())
    )


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
