"""The score task, as Prefect sees it."""

from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE


class ScoredPart(Protocol):
    """A part of a group: scores stay in it.

    No implementation is a dataclass: Prefect looks into dataclasses among a task's parameters.
    """

    async def score(self) -> str:
        """Score it; returns how it went, in words."""


@task(
    name="score",
    task_run_name="step {step} / score {label}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def score(part: ScoredPart, step: int, label: str) -> str:
    """Score a part of a group. The label says which: "384", or "384.2" of a group in several parts."""
    return await part.score()
