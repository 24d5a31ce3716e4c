"""Sample what is missing of one group, in one part or several."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tasks.observe.spans import span, within
from tasks.rollout.admission import Admission, Place
from tasks.rollout.environment import Environment
from tasks.rollout.foreign import problem_of
from tasks.rollout.prompts import example_index, sampling_seed
from tasks.rollout.rows_together import Keep, RowsTogether
from tasks.rollout.sampling import Deadline, Player
from tasks.rollout.state import states_of
from tasks.rollout.trajectory import Trajectory, Work, rollout_rows
from tasks.store.attempts import short_id
from tasks.store.routing import routing_row
from tasks.store.rows import Rows, joined, no_rows
from tasks.store.states import state_row
from tasks.store.step import Attempt

LOST = ("failed", "cancelled")

Item = TypeVar("Item")
KeepBeside = Callable[[str, Rows], Awaitable[None]]


async def group_work(
    environment: Environment,
    *,
    run: str,
    seed: int,
    group: int,
    attempts: Sequence[Attempt],
    temperature: float,
    timeout_s: float,
) -> list[Work]:
    """The trajectories to sample for a group: a pure function of its arguments.

    A problem that the environment does not give within `timeout_s` seconds is missing from its work.

    Example: run "ab", group 7 and the first attempts of samples 0 and 3 give the trajectory ids "ab.7.0.0" and
    "ab.7.3.0".
    """
    index = example_index(seed, group, environment.size("train"))
    example, missing = await problem_of(environment, "train", index, timeout_s)
    return [
        Work(
            trajectory_id=f"{run}.{group}.{each.sample}.{each.attempt}",
            group=group,
            sample=each.sample,
            attempt=each.attempt,
            example=example,
            seed=sampling_seed(seed, group, each.sample),
            temperature=temperature,
            missing=missing,
        )
        for each in attempts
    ]


def parts_of(work: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Work in parts of at most `size` items; 0: all in one. Example: 5 in parts of 2 are 2, 2 and 1."""
    step = size or max(1, len(work))
    return [work[first : first + step] for first in range(0, len(work), step)]


class GroupClock:
    """Sets when a group is cut: `timeout_s` seconds after the first of its trajectories begins."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline: Deadline | None = None

    def deadline(self) -> Deadline:
        """The group's deadline; asking for it the first time starts the clock."""
        if self._deadline is None:
            at = asyncio.get_running_loop().time() + self._timeout_s
            self._deadline = Deadline(at, f"rollout.group_timeout_s = {self._timeout_s:g} s")
        return self._deadline

    def remaining_s(self) -> float:
        """Seconds until the group is cut."""
        return max(0.0, self.deadline().at - asyncio.get_running_loop().time())


def _nothing(lost: Rows) -> None:
    """Nobody wants to know what is lost."""


@dataclass(frozen=True, slots=True)
class StepSampler:
    """Samples trajectories of one step, each in a slot of its own.

    Attributes:
        keep: hands rows to the run's writer; what it returns is done when they are acknowledged.
        keep_beside: hands rows of another data set to it, named; those of a rollout before the rollout itself.
        keeps_routing: True to keep which experts tokens were routed to.
        see_lost: is shown each row that failed or was cut, in the task that sampled it; what it raises ends that.
    """

    player: Player
    admission: Admission
    run: str
    step: int
    keep: Keep
    keep_beside: KeepBeside | None = None
    keeps_routing: bool = False
    see_lost: Callable[[Rows], None] = _nothing
    _together: RowsTogether = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_together", RowsTogether(self._rows_of, self.keep))

    async def sample(
        self, work: Sequence[Work], places: Sequence[Place], clock: GroupClock
    ) -> tuple[Rows, list[Awaitable[None]]]:
        """Sample trajectories side by side, each as its place in line is served; each is stored the moment it finishes.

        Returns:
            Their rows, in the order of `work`, and the acknowledgements to wait for.
        """
        created = time.perf_counter()
        deadline = clock.deadline()
        acknowledgements: list[Awaitable[None]] = []

        async def one(item: Work, place: Place) -> Rows:
            with within(lane=short_id(item.trajectory_id)):
                return await sampled(item, place)

        async def sampled(item: Work, place: Place) -> Rows:
            try:
                async with self.admission.slot(place, deadline.at):
                    queue_s = time.perf_counter() - created
                    trajectory = await self.player.play(
                        item,
                        queue_s=queue_s,
                        group_deadline=deadline,
                        keeps_routing=self.keeps_routing,
                    )
                    return await self.store(trajectory, acknowledgements)
            except TimeoutError:
                trajectory = self.player.not_begun(item, time.perf_counter() - created, deadline)
            return await self.store(trajectory, acknowledgements)

        async with asyncio.TaskGroup() as sampling:
            tasks = []
            for item, place in zip(work, places, strict=True):
                tasks.append(sampling.create_task(one(item, place)))
        return joined(*(task.result() for task in tasks)), acknowledgements

    async def store(self, trajectory: Trajectory, acknowledgements: list[Awaitable[None]]) -> Rows:
        """Hand a trajectory to the writer, what lies beside it first; returns its row.

        With bulk it returns when that is stored: its slot is held by what waits for the disk, so memory stays bounded.
        """
        beside = await self._beside(trajectory)
        waits = [self.keep_beside(*each) for each in beside.items()] if self.keep_beside else []
        row, acknowledged = await self._together.row_of(trajectory)
        acknowledgements += [*waits, acknowledged]
        if trajectory.status in LOST:
            self.see_lost(row)
        if "routing" in beside:
            with span("storing", cause="routed experts"):
                await asyncio.wait([asyncio.ensure_future(each) for each in waits])
        return row

    def _rows_of(self, trajectories: Sequence[Trajectory]) -> Rows:
        return rollout_rows(self.run, self.step, self.player.environment.name, trajectories)

    async def _beside(self, trajectory: Trajectory) -> dict[str, Rows]:
        """The rows of other data sets that belong to a trajectory, by data set."""
        work, environment = trajectory.work, self.player.environment
        rows = {}
        if parts := trajectory.routed_experts:
            rows["routing"] = await asyncio.to_thread(
                routing_row, self.run, self.step, work.trajectory_id, parts
            )
        if columns := states_of(environment):
            rows["states"] = state_row(
                environment.name,
                columns,
                run=self.run,
                step=self.step,
                group=work.group,
                sample=work.sample,
                trajectory_id=work.trajectory_id,
                values=trajectory.state.values,
                error=trajectory.state.error,
            )
        return rows


class RolloutPart:
    """Trajectories of one group that one rollout task samples, and their rows when it has.

    Not a dataclass: Prefect looks into dataclasses among a task's parameters, and this one is only handed on.
    """

    __slots__ = ("acknowledgements", "clock", "places", "rows", "sampler", "work")

    def __init__(
        self, sampler: StepSampler, work: Sequence[Work], places: Sequence[Place], clock: GroupClock
    ) -> None:
        self.sampler, self.work, self.places, self.clock = sampler, work, places, clock
        self.rows = no_rows("rollouts")
        self.acknowledgements: list[Awaitable[None]] = []

    async def sample(self) -> str:
        """Fill `rows`; returns how it went, in words."""
        with span("sampling"):
            self.rows, self.acknowledgements = await self.sampler.sample(self.work, self.places, self.clock)
        statuses = self.rows.column("status").to_pylist()
        counts = [(status, statuses.count(status)) for status in dict.fromkeys(statuses)]
        return ", ".join(f"{n} {status}" for status, n in counts)
