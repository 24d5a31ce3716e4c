"""The score task, as Prefect sees it."""

from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State


class Scored(Protocol):
    """A part of a group to be scored: what comes of it stays in it.

    No implementation is a dataclass: Prefect looks into dataclasses among a task's parameters.
    """

    async def score(self) -> State[object]:
        """Score it; returns the state in which its task run ends."""


@task(
    name="score",
    task_run_name="step {step} / score {label}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def score(part: Scored, step: int, label: str) -> State[object]:
    """Score a part of a group. The label says which: "384", or "384.2" of a group in several parts."""
    return await part.score()
