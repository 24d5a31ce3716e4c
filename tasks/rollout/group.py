"""Sample what is missing of one group."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tasks.rollout.environment import Environment
from tasks.rollout.prompts import example_index, sampling_seed
from tasks.rollout.sampling import Player
from tasks.rollout.trajectory import Trajectory, Work, rollout_rows
from tasks.store.rows import Rows, no_rows

Keep = Callable[[Rows], Awaitable[None]]


async def group_work(
    environment: Environment, *, run: str, seed: int, group: int, samples: Sequence[int], temperature: float
) -> list[Work]:
    """The trajectories to sample for a group: a pure function of its arguments.

    Example: run "ab", group 7 and samples (0, 3) give the trajectory ids "ab.7.0.0" and "ab.7.3.0".
    """
    example = await environment.example("train", example_index(seed, group, environment.size("train")))
    return [
        Work(
            trajectory_id=f"{run}.{group}.{sample}.0",
            group=group,
            sample=sample,
            attempt=0,
            example=example,
            seed=sampling_seed(seed, group, sample),
            temperature=temperature,
        )
        for sample in samples
    ]


@dataclass(frozen=True, slots=True)
class StepSampler:
    """Samples trajectories of one step, at most as many at once as `admission` lets in.

    Attributes:
        keep: hands rows to the run's writer; what it returns is done when they are acknowledged.
    """

    player: Player
    admission: asyncio.Semaphore
    run: str
    step: int
    keep: Keep

    async def sample(self, work: Sequence[Work]) -> tuple[Rows, list[Awaitable[None]]]:
        """Sample trajectories side by side; each goes to the writer the moment it finishes.

        Returns:
            Their rows, in the order of `work`, and the acknowledgements to wait for.
        """
        created = time.perf_counter()
        acknowledgements: list[Awaitable[None]] = []

        async def one(item: Work) -> Trajectory:
            async with self.admission:
                trajectory = await self.player.play(item, queue_s=time.perf_counter() - created)
            acknowledgements.append(self.keep(self.rows([trajectory])))
            return trajectory

        async with asyncio.TaskGroup() as sampling:
            tasks = [sampling.create_task(one(item)) for item in work]
        return self.rows([task.result() for task in tasks]), acknowledgements

    def rows(self, trajectories: Sequence[Trajectory]) -> Rows:
        """Trajectories as rows of the `rollouts` data set."""
        return rollout_rows(self.run, self.step, self.player.environment.name, trajectories)


class GroupPart:
    """Trajectories of one group that one rollout task samples, and their rows when it has.

    Not a dataclass: Prefect looks into dataclasses among a task's parameters, and this one is only handed on.
    """

    __slots__ = ("acknowledgements", "rows", "sampler", "work")

    def __init__(self, sampler: StepSampler, work: Sequence[Work]) -> None:
        self.sampler, self.work = sampler, work
        self.rows = no_rows("rollouts")
        self.acknowledgements: list[Awaitable[None]] = []

    async def sample(self) -> str:
        """Fill `rows`; returns how it went, in words."""
        self.rows, self.acknowledgements = await self.sampler.sample(self.work)
        n_failed = self.rows.column("status").to_pylist().count("failed")
        return f"{self.rows.num_rows} trajectories, {n_failed} failed"
