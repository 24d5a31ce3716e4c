"""The rollout task, as Prefect sees it."""

from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE


class SampledPart(Protocol):
    """A part of a group: sampled trajectories stay in it.

    No implementation is a dataclass: Prefect looks into dataclasses among a task's parameters.
    """

    async def sample(self) -> str:
        """Sample it; returns how it went, in words."""


@task(
    name="rollout",
    task_run_name="step {step} / rollout {label}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def rollout(part: SampledPart, step: int, label: str) -> str:
    """Sample a part of a group. The label says which: "384", or "384.2" of a group in several parts."""
    return await part.sample()
