"""The score task, as Prefect sees it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.score.part import ScorePart


@task(
    name="score",
    task_run_name="step {step} / score {group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def score(part: ScorePart, step: int, group: int) -> str:
    """Score a part of a group; the rows stay in `part`, what is returned says how it went."""
    return await part.score()
