"""The rollout task: samples a chunk of a group's trajectories, and stores each one when it ends."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rollmill.tasks.observe.loop_yield import yield_to_loop
from rollmill.tasks.observe.spans import span, within
from rollmill.tasks.rollout.admission import Admission, SlotTicket
from rollmill.tasks.rollout.environment_calls import state_columns
from rollmill.tasks.rollout.episode import DEADLINE, Deadline, EpisodePlayer
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryBuilder, TrajectoryRequest, rollout_rows
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.environment_states import state_row
from rollmill.tasks.store.expert_routing import make_routing_row
from rollmill.tasks.store.rows import Rows, concat_rows
from rollmill.tasks.store.schemas import LOST_STATUSES

StoreRows: TypeAlias = Callable[[Rows], Awaitable[None]]
"""Gives rows to the run's writer; what it returns is done when they are stored."""

StoredRow: TypeAlias = tuple[Rows, Awaitable[None]]
"""A row that was passed on, and what is done when it is acknowledged."""
StoreRelatedRows: TypeAlias = Callable[[str, Rows], Awaitable[None]]
"""As `StoreRows`, for rows of the data set with this name."""


class SampledChunk:
    """Rollouts of one rollout task: their rows in memory, and the pending writes that store them.

    It allows weak references, by which Prefect finds the task run that a later task depends on.

    Attributes:
        rows: [B] of the data set `rollouts`.
        acknowledgements: each is done when its rows are stored.
    """

    __slots__ = ("__weakref__", "acknowledgements", "rows")

    def __init__(self, rows: Rows, acknowledgements: Sequence[Awaitable[None]]) -> None:
        self.rows, self.acknowledgements = rows, acknowledgements

    @property
    def summary(self) -> str:
        """Number of trajectories by status. Example: "7 complete, 1 failed"."""
        statuses = self.rows.column("status").to_pylist()
        return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


class RolloutWork(Protocol):
    """Work of one rollout task: trajectories of one group, which it samples or which are stored already.

    No implementation is a dataclass: Prefect searches the fields of dataclasses among a task's parameters.
    """

    async def sample(self) -> SampledChunk:
        """Return the rows of the trajectories; each one that is sampled goes to the run's writer when it finishes."""


# No retries, regardless of PREFECT_TASKS_DEFAULT_RETRIES: single requests are retried, a failed trajectory is a
# stored row, and Prefect would sample a chunk again under trajectory ids that are stored.
# No timeout_seconds: rollout.trajectory_timeout_s and the group's limit store late trajectories as cancelled rows and
# keep the rest of the chunk, which Prefect's timeout would lose.
@task(
    name="rollout",
    task_run_name="step {step} / rollout {label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
async def rollout(chunk: RolloutWork, step: int, label: str) -> State[SampledChunk]:
    """Sample trajectories of a group as one Prefect task, and return a completed state with a SampledChunk.

    The state's message has the number of trajectories by status. `label` is "384" for group 384, "384.2" for the third of its
    chunks.
    """
    sampled = await chunk.sample()
    await yield_to_loop()
    return Completed(message=sampled.summary, data=sampled)


class RowBatcher:
    """Builds and stores the rows of all trajectories that end in the same iteration of the event loop together.

    Building one row takes Arrow about as long as building ten. A row is delayed by one iteration at most. `make` builds rows from
    trajectories, one each; `keep` passes them to the run's writer.
    """

    def __init__(self, make: Callable[[Sequence[Trajectory]], Rows], keep: StoreRows) -> None:
        self._make, self._keep = make, keep
        self._ended: list[tuple[Trajectory, asyncio.Future[StoredRow]]] = []

    async def store_row(self, trajectory: Trajectory) -> StoredRow:
        """Store a trajectory's row; returns the row and an awaitable that is done when it is stored.

        The row is stored even if the waiting task is cancelled.
        """
        loop = asyncio.get_running_loop()
        if not self._ended:
            loop.call_soon(self._store_ended)
        kept: asyncio.Future[StoredRow] = loop.create_future()
        self._ended.append((trajectory, kept))
        return await kept

    def _store_ended(self) -> None:
        ended, self._ended = self._ended, []
        waiting = [(place, kept) for place, (_, kept) in enumerate(ended) if not kept.cancelled()]
        try:
            rows = self._make([trajectory for trajectory, _ in ended])
            acknowledged = asyncio.ensure_future(self._keep(rows))
        except Exception as error:  # noqa: BLE001 - it must reach the callers that wait for these rows
            for _, kept in waiting:
                kept.set_exception(error)
            return
        for place, kept in waiting:
            kept.set_result((rows.slice(place, 1), acknowledged))


@dataclass(slots=True)
class StepSampler:
    """Samples trajectories of one step, each once `admission` grants it a slot, and stores their rows.

    Attributes:
        store_rollouts: passes rows to the run's writer; the awaitable it returns is done when they are stored.
        store_related: passes rows of the named data set to the writer; called for a rollout before `store_rollouts` is.
        keeps_routing: True to store which experts the tokens were routed to.
        on_lost: called with each row that failed or was cancelled, in the task that sampled it; what it raises ends that task.
        env: name of the environment in the rows; empty: that of the player's environment.
    """

    player: EpisodePlayer
    admission: Admission
    run: str
    step: int
    store_rollouts: StoreRows
    store_related: StoreRelatedRows | None = None
    keeps_routing: bool = False
    on_lost: Callable[[Rows], None] = lambda lost: None
    env: str = ""
    _together: RowBatcher = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.env = self.env or self.player.environment.name
        self._together = RowBatcher(partial(rollout_rows, self.run, self.step, self.env), self.store_rollouts)

    async def sample(
        self,
        request: TrajectoryRequest,
        ticket: SlotTicket,
        deadline: Deadline,
        acknowledgements: list[Awaitable[None]],
    ) -> Rows:
        """Wait for a slot, sample a trajectory, and store it when it ends; returns its row of `rollouts`.

        A trajectory without a slot by the group's deadline is stored as cancelled. `acknowledgements` gets awaitables that are
        done when the rows are stored.
        """
        created = time.perf_counter()
        with within(lane=short_id(request.trajectory_id)):
            try:
                async with self.admission.slot(ticket, deadline.at):
                    trajectory = await self.player.play(
                        request,
                        queue_s=time.perf_counter() - created,
                        group_deadline=deadline,
                        keeps_routing=self.keeps_routing,
                    )
                    return await self.store(trajectory, acknowledgements)
            except TimeoutError:
                draft = TrajectoryBuilder(request, time.perf_counter() - created, error_type=DEADLINE)
                draft.error = f"cut before it began: {deadline.setting}"
                trajectory = draft.build("cancelled")
            return await self.store(trajectory, acknowledgements)

    async def store(self, trajectory: Trajectory, acknowledgements: list[Awaitable[None]]) -> Rows:
        """Pass a trajectory's row to the run's writer, after its rows of other data sets; returns the row of `rollouts`.

        For a trajectory with routed experts it returns only when these are stored: the slot is held until then, which bounds the
        memory.
        """
        related = await self._make_related_rows(trajectory)
        waits = [self.store_related(*each) for each in related.items()] if self.store_related else []
        row, acknowledged = await self._together.store_row(trajectory)
        acknowledgements += [*waits, acknowledged]
        if trajectory.status in LOST_STATUSES:
            self.on_lost(row)
        if "routing" in related:
            with span("storing", cause="routed experts"):
                await asyncio.wait([asyncio.ensure_future(each) for each in waits])
        return row

    async def _make_related_rows(self, trajectory: Trajectory) -> dict[str, Rows]:
        """Return a trajectory's rows of the data sets `routing` and `states`, by data set, if it has any."""
        work, environment = trajectory.work, self.player.environment
        rows = {}
        if parts := trajectory.routed_experts:
            rows["routing"] = await asyncio.to_thread(
                make_routing_row, self.run, self.step, work.trajectory_id, parts
            )
        if columns := state_columns(environment):
            rows["states"] = state_row(
                self.env,
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


class RolloutChunk:
    """Trajectories of one group that one rollout task samples.

    Not a dataclass: Prefect searches the fields of dataclasses among a task's parameters.
    """

    __slots__ = ("deadline", "sampler", "tickets", "work")

    def __init__(
        self,
        sampler: StepSampler,
        work: Sequence[TrajectoryRequest],
        tickets: Sequence[SlotTicket],
        deadline: Deadline,
    ) -> None:
        self.sampler, self.work, self.tickets, self.deadline = sampler, work, tickets, deadline

    async def sample(self) -> SampledChunk:
        """Sample the trajectories concurrently; each is given to the run's writer when it finishes."""
        acknowledgements: list[Awaitable[None]] = []
        with span("sampling"):
            async with asyncio.TaskGroup() as sampling:
                tasks = [
                    sampling.create_task(
                        self.sampler.sample(request, ticket, self.deadline, acknowledgements)
                    )
                    for request, ticket in zip(self.work, self.tickets, strict=True)
                ]
        return SampledChunk(concat_rows(*(task.result() for task in tasks)), acknowledgements)


class StoredChunk:
    """Rollouts of a group that an earlier attempt at the run stored; nothing is sampled.

    A rollout task returns them, so that Prefect's graph has an edge to their score task: the task run that sampled them is in the
    graph of the earlier attempt.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    async def sample(self) -> SampledChunk:
        """Return the stored rows, with no pending writes."""
        return SampledChunk(self.rows, ())
