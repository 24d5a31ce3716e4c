"""The score task, as Prefect records it."""

from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rollmill.tasks.observe.loop_yield import yield_to_loop
from rollmill.tasks.score.scoring import ScoredChunk


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

    The state's message has the number of scores and their mean reward.

    Args:
        chunk: the rollouts to score.
        step: the step that the rollouts belong to.
        label: "384" for group 384, "384.2" for the third of its chunks.
    """
    scored = await chunk.score()
    # Prefect's work at the end of a task run holds the event loop: tasks that end together take turns.
    await yield_to_loop()
    return Completed(message=scored.summary, data=scored)
