"""The rows of a group that one score task scores."""

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from tasks.score.scorer import Scorer
from tasks.score.scoring import score_off_loop
from tasks.store.rows import Rows, no_rows

Keep = Callable[[Rows], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StepScorer:
    """Scores rows of one step.

    Attributes:
        executor: worker processes; None: a thread.
        keep: hands rows to the run's writer; what it returns is done when they are acknowledged.
    """

    scorer: Scorer
    executor: Executor | None
    timeout_s: float
    run: str
    step: int
    keep: Keep


class ScorePart:
    """Rollouts to be scored, and their scores when they are.

    Not a dataclass: Prefect looks into dataclasses among a task's parameters, and this one is only handed on.
    """

    __slots__ = ("acknowledgements", "rollouts", "rows", "step_scorer")

    def __init__(self, step_scorer: StepScorer, rollouts: Rows) -> None:
        self.step_scorer, self.rollouts = step_scorer, rollouts
        self.rows = no_rows("scores")
        self.acknowledgements: list[Awaitable[None]] = []

    async def score(self) -> str:
        """Fill `rows`; returns how it went, in words."""
        with_ = self.step_scorer
        self.rows = await score_off_loop(
            with_.executor, with_.scorer, with_.run, with_.step, self.rollouts, with_.timeout_s
        )
        self.acknowledgements = [with_.keep(self.rows)]
        rewards = [row for row in self.rows.column("reward").to_pylist() if row == row]
        mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        return f"{self.rows.num_rows} scores{mean}"
