"""The rollout task, as Prefect sees it."""

from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State


class Sampled(Protocol):
    """A part of a group to be sampled: what comes of it stays in it.

    No implementation is a dataclass: Prefect looks into dataclasses among a task's parameters.
    """

    async def sample(self) -> State[object]:
        """Sample it; returns the state in which its task run ends."""


@task(
    name="rollout",
    task_run_name="step {step} / rollout {label}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def rollout(part: Sampled, step: int, label: str) -> State[object]:
    """Sample a part of a group. The label says which: "384", or "384.2" of a group in several parts."""
    return await part.sample()
