"""The score task: scores rollouts of a step, and passes the scores to the run's writer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rollmill.tasks.observe.loop_yield import yield_to_loop
from rollmill.tasks.observe.spans import span
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.store.rows import Rows, concat_rows


class ScoredChunk:
    """Scores of one score task: their rows in memory, and the pending writes that store them.

    Attributes:
        rows: [B] of the data set `scores`.
        acknowledgements: each is done when its rows are stored.
    """

    __slots__ = ("__weakref__", "acknowledgements", "rows")

    def __init__(self, rows: Rows, acknowledgements: Sequence[Awaitable[None]] = ()) -> None:
        self.rows, self.acknowledgements = rows, acknowledgements

    @property
    def summary(self) -> str:
        """Number of scores and their mean reward. Example: "8 scores, mean reward 0.625"."""
        rewards = [reward for reward in self.rows.column("reward").to_pylist() if reward == reward]
        mean = f", mean reward {sum(rewards) / len(rewards):z.3f}" if rewards else ""
        return f"{self.rows.num_rows} scores{mean}"


class ScoreWork(Protocol):
    """Work of one score task: the rollouts that it scores.

    No implementation is a dataclass: Prefect searches the fields of dataclasses among a task's parameters.
    """

    async def score(self) -> ScoredChunk:
        """Score the rollouts, pass the scores to the run's writer, and return them."""


# No retries, whatever PREFECT_TASKS_DEFAULT_RETRIES says: a judge repeats its requests, and a score that failed is a stored row.
# No timeout_seconds: score.timeout_s ends a call, whose score is a failed row; Prefect's timeout would lose the chunk's scores.
@task(
    name="score",
    task_run_name="step {step} / score {label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
async def score(chunk: ScoreWork, step: int, label: str) -> State[ScoredChunk]:
    """Score rollouts as one Prefect task, and return a completed state with a ScoredChunk.

    The state's message has the number of scores and their mean reward. `label` is "384" for group 384, "384.2" for the third of
    its chunks.
    """
    scored = await chunk.score()
    # Prefect's work at the end of a task run holds the event loop: tasks that end together take turns.
    await yield_to_loop()
    return Completed(message=scored.summary, data=scored)


class ScoreChunk:
    """Groups of rollouts of one step, or parts of them, that one score task scores.

    Args:
        groups: scorable rows; for a group scorer, all survivors of each group.
        store: passes rows to the run's writer; the awaitable it returns is done when they are stored. A group's rows are passed
            together.
    """

    __slots__ = ("groups", "scoring", "step", "store")

    def __init__(
        self, scoring: Scoring, groups: Sequence[Rows], step: int, store: Callable[[Rows], Awaitable[None]]
    ) -> None:
        self.scoring, self.groups, self.step, self.store = scoring, groups, step, store

    async def score(self) -> ScoredChunk:
        """Score the groups, pass the scores to the run's writer, and return them."""
        shown = self.groups if self.scoring.by_group else [concat_rows(*self.groups)]
        acknowledgements: list[Awaitable[None]] = []
        with span("scoring"):
            async with asyncio.TaskGroup() as scoring:
                tasks = [scoring.create_task(self._score(each, acknowledgements)) for each in shown]
        return ScoredChunk(concat_rows(*(task.result() for task in tasks)), acknowledgements)

    async def _score(self, rollouts: Rows, acknowledgements: list[Awaitable[None]]) -> Rows:
        rows = await self.scoring.score(rollouts, step=self.step)
        acknowledgements.append(self.store(rows))
        return rows
