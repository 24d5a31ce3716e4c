"""What a step has stored, as its report goes by it: read once, for all that is made of it."""

from dataclasses import dataclass
from typing import Self

import polars as pl

from tasks.store.layout import RunFolder
from tasks.store.reader import scan

ROLLOUTS = (
    "trajectory_id",
    "group",
    "sample",
    "attempt",
    "env",
    "n_completion_tokens",
    "status",
    "error_type",
)
SCORES = ("trajectory_id", "subgroup", "status", "error_type")
GROUPS = ("group", "subgroup", "reason", "reward_mean")


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one step, without what is long in them.

    Attributes:
        rollouts: all attempts; columns ROLLOUTS.
        scores: of one scorer; columns SCORES.
        groups: columns GROUPS.
    """

    rollouts: pl.DataFrame
    scores: pl.DataFrame
    groups: pl.DataFrame

    @classmethod
    def read(cls, folder: RunFolder, step: int, scorer: str) -> Self:
        """Read what is stored of a step, with the scores of `scorer` (NAME@VERSION)."""
        return cls(
            rollouts=scan(folder, "rollouts", ROLLOUTS, step=step).collect(),
            scores=scan(folder, "scores", SCORES, scorer=scorer, step=step).collect(),
            groups=scan(folder, "groups", GROUPS, step=step).collect(),
        )
