"""The rollout task, as Prefect sees it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.rollout.group import GroupPart


@task(
    name="rollout",
    task_run_name="step {step} / rollout {group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def rollout(part: GroupPart, step: int, group: int) -> str:
    """Sample a part of a group; the rows stay in `part`, what is returned says how it went."""
    return await part.sample()
