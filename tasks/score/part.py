"""The rows of a group that one score task scores."""

from collections.abc import Awaitable, Callable

from tasks.observe.spans import span
from tasks.score.scoring import Scoring
from tasks.store.rows import Rows, no_rows

Keep = Callable[[Rows], Awaitable[None]]


class ScorePart:
    """Rollouts to be scored, and their scores when they are.

    Not a dataclass: Prefect looks into dataclasses among a task's parameters, and this one is only handed on.

    Args:
        keep: hands rows to the run's writer; what it returns is done when they are acknowledged.
    """

    __slots__ = ("acknowledgements", "keep", "rollouts", "rows", "scoring", "step")

    def __init__(self, scoring: Scoring, rollouts: Rows, step: int, keep: Keep) -> None:
        self.scoring, self.rollouts, self.step, self.keep = scoring, rollouts, step, keep
        self.rows = no_rows("scores")
        self.acknowledgements: list[Awaitable[None]] = []

    async def score(self) -> str:
        """Fill `rows`; returns how it went, in words."""
        with span("scoring"):
            self.rows = await self.scoring.score(self.rollouts, step=self.step)
        self.acknowledgements = [self.keep(self.rows)]
        rewards = [row for row in self.rows.column("reward").to_pylist() if row == row]
        mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        return f"{self.rows.num_rows} scores{mean}"
