"""Sums over whole data sets, partition by partition, so that one step's rows are in memory at a time."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tasks.store.layout import RunFolder
from tasks.store.partitions import stored_scorers, stored_steps
from tasks.store.reader import read


@dataclass(frozen=True, slots=True)
class ScoreTotals:
    """All that one scorer said of a run's rollouts.

    Attributes:
        scorer: NAME@VERSION.
        by_status: scores with each status: scored, failed, dropped.
        reward: mean over the scored ones; NaN without any.
    """

    scorer: str
    by_status: Counter[str]
    reward: float


def score_totals(folder: RunFolder) -> list[ScoreTotals]:
    """One for each scorer whose scores a run holds, in order of name."""
    return [_totals(folder, scorer) for scorer in stored_scorers(folder)]


def _totals(folder: RunFolder, scorer: str) -> ScoreTotals:
    by_status: Counter[str] = Counter()
    total = 0.0
    for step in stored_steps(folder, "scores", scorer=scorer):
        rows = read(folder, "scores", ["status", "reward"], scorer=scorer, step=step)
        by_status.update(rows["status"].to_pylist())
        total += float(np.nansum(rows["reward"].to_numpy()))
    n_scored = by_status["scored"]
    return ScoreTotals(scorer, by_status, total / n_scored if n_scored else float("nan"))
