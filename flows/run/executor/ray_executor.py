"""The executor `ray`: actors of a Ray cluster sample and score a run's groups; what a lost actor had stored is kept, the rest made again."""

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.executor.actor_messages import (
    ROLLOUT_COLUMNS,
    SCORE_COLUMNS,
    ActorReport,
    ActorStart,
)
from rollmill.flows.run.executor.group_actor import GroupActor
from rollmill.flows.run.executor.group_work import GroupTask, SeeRows
from rollmill.flows.run.executor.ray_cluster import connect_cluster
from rollmill.flows.run.run_environment import merge_metrics
from rollmill.tasks.errors import RollmillError, ServiceDiedError, ServiceStartError
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.rollout.admission import Admission, SlotTicket
from rollmill.tasks.rollout.episode import Deadline
from rollmill.tasks.rollout.task import RolloutWork, SampledChunk
from rollmill.tasks.score.task import ScoredChunk, ScoreWork
from rollmill.tasks.serve.server_pool import ServerChange, ServerPool
from rollmill.tasks.store.reader import read_chosen
from rollmill.tasks.store.rows import (
    Rows,
    column_values,
    concat_rows,
    no_rows,
    rows_from_table,
    rows_where_in,
)
from rollmill.tasks.store.run.lock import await_writers
from rollmill.tasks.store.run.step_plan import Attempt
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import LOST_STATUSES

# Between two reports of an actor, each of which costs the flow half a millisecond; meanwhile the actor plays trajectories that wait there.
REPORT_INTERVAL_S = 0.2
# How long the flow's commits wait for more rows: each costs as much CPU as all else of a group, and only the row of the group is left.
FLUSH_S = 0.1
WAITING_GROUPS = 2
"""Groups more than it has slots for that an actor gets, so that a slot that is free need not wait for the flow."""
# Calls of an actor that run at once: groups that wait for a slot are calls too.
MOST_CALLS = 100_000
CLOSE_TIMEOUT_S = 30.0


class ActorLostError(Exception):
    """A call of an actor failed because the actor, its process or its machine is gone."""


class RemoteActor:
    """The flow's view of one actor.

    Attributes:
        outstanding: number of trajectories that it was asked for and that have not ended.
        is_open: True once its environments are open.
        is_lost: True once a call has failed because it is gone.
        replaced: done when what it left is settled, and another has its place if one may.
    """

    def __init__(self, ray: Any, handle: Any, name: str, restarts: int, store: OpenRun) -> None:
        self.handle, self.name, self.restarts, self._store = handle, name, restarts, store
        self.outstanding = 0
        self.is_open = self.is_lost = False
        self.replaced: asyncio.Task[None] | None = None
        # Slots of the flow's admission that its trajectories hold, by group.
        self.tickets: dict[int, list[SlotTicket]] = {}
        errors = ray.exceptions
        self._gone = (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
        )
        self._failed = errors.RayTaskError

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the actor, record the shards that it has written, and return its result.

        Raises:
            ActorLostError: the actor is gone; the call may have had an effect.
        """
        try:
            # As bytes, which cost Ray a tenth of what an object costs it.
            given, next_shard = pickle.dumps(arguments), self._store.writer.n_shards
            reply = pickle.loads(await self.handle.do.remote(method, given, next_shard))
        except self._gone as error:
            self.is_lost = True
            raise ActorLostError(self.name) from error
        except self._failed as error:
            cause = error.cause
            raise cause if isinstance(cause, RollmillError) else error from None
        self._store.writer.note_written(reply.shards)
        return reply.result

    @contextmanager
    def asked(self, group: int, tickets: Sequence[SlotTicket]) -> Iterator[None]:
        """Count trajectories of a group as outstanding until they are reported as ended, or the block is left."""
        waiting = self.tickets.setdefault(group, [])
        waiting += tickets
        self.outstanding += len(tickets)
        try:
            yield
        finally:
            left = [each for each in tickets if each in waiting]
            self.outstanding -= len(left)
            for each in left:
                waiting.remove(each)
            if not waiting:
                self.tickets.pop(group, None)

    def take_ended(self, group: int, n: int) -> list[SlotTicket]:
        """Return the tickets of `n` trajectories of a group that have ended; they no longer count as outstanding."""
        waiting = self.tickets.get(group, [])
        ended, waiting[:n] = waiting[:n], []
        self.outstanding -= len(ended)
        return ended


class RayExecutor:
    """Samples and scores groups in Ray actors; a context manager of `open_ray_executor`.

    The flow remains the authority: it plans groups, grants slots, watches servers, computes advantages and records in Prefect. An actor
    stores the rows of its groups itself, and returns those columns that the flow computes with.

    Attributes:
        run: id of the run.
    """

    def __init__(self, ray: Any, background: asyncio.TaskGroup, shared: "SharedRun", model: Path) -> None:
        self._ray, self._background, self._shared = ray, background, shared
        config, store = self._config, self._store = shared.config, shared.store
        self._pool, self.run = shared.pool, store.manifest.run
        self._names = count()
        self._actors: list[RemoteActor] = []
        self._is_changed = asyncio.Event()
        self._changes: set[asyncio.Future[bytes]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._step = 0
        self._start = ActorStart(
            name="",
            run=self.run,
            epoch=store.manifest.epoch,
            location=store.folder.absolute,
            model=str(model.absolute()),
            settings=config.model_dump_json(),
            # Rounded down: all actors together play at most so many.
            slots=max(1, config.rollout.max_in_flight // config.executor.actors),
            path=tuple(str(Path(each).absolute()) for each in sys.path),
            cwd=str(Path.cwd()),
            log="",
        )

    # The pool's mirror

    def change(self, change: ServerChange) -> None:
        """Send a change of the pool of servers to all actors; Ray keeps the order."""
        for actor in self._actors:
            sent = actor.handle.do.remote("change_servers", pickle.dumps(([change],)))
            self._changes.add(made := asyncio.ensure_future(sent))
            made.add_done_callback(self._changes.discard)

    async def settle(self) -> None:
        """Wait until all actors that live have made all changes so far."""
        if self._changes:
            # Those of a lost actor fail; its calls report that.
            await asyncio.wait(list(self._changes))

    # Actors

    async def start(self) -> None:
        """Start the actors; raises ServiceStartError if the cluster has no room for one, or one cannot open the run's environments."""
        self._pool.mirror = self
        self._store.writer.flush_s = FLUSH_S
        async with asyncio.TaskGroup() as starting:
            for _ in range(self._config.executor.actors):
                starting.create_task(self._start_actor(0))

    async def _start_actor(self, restarts: int) -> None:
        name, timeout_s = str(next(self._names)), self._config.start_timeout_s
        log = Path(self._start.location) / "logs" / f"actor-{name}.log"
        start = replace(self._start, name=f"{self._store.manifest.epoch}-{name}", log=str(log))
        options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": MOST_CALLS}
        handle = self._ray.remote(GroupActor).options(**options).remote(start)
        actor = RemoteActor(self._ray, handle, start.name, restarts, self._store)
        # From now on it gets all changes, after those in its first call.
        self._actors.append(actor)
        try:
            async with asyncio.timeout(timeout_s):
                await actor.call("open", self._pool.changes)
        except (TimeoutError, ActorLostError) as error:
            self._actors.remove(actor)
            self._ray.kill(handle)
            what = f"it did not start within start_timeout_s = {timeout_s:g} s: the cluster needs one free CPU for each of executor.actors"
            reason = what if isinstance(error, TimeoutError) else str(error.__cause__ or error)
            raise ServiceStartError(f"Ray actor {name}", reason) from None
        actor.is_open = True
        self._is_changed.set()
        self._in_background(self._listen(actor))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks = [each for each in self._tasks if not each.done()]
        self._tasks.append(self._background.create_task(work))
        return self._tasks[-1]

    async def _listen(self, actor: RemoteActor) -> None:
        """Take an actor's reports until it is gone."""
        with suppress(ActorLostError):
            while True:
                report: ActorReport = await actor.call("report")
                for group, n in report.finished.items():
                    for ticket in actor.take_ended(group, n):
                        self._shared.admission.release(ticket)
                for url, is_out in report.alarms.items():
                    self._pool.take_alarm(url, is_out=is_out)
                await asyncio.sleep(REPORT_INTERVAL_S)
        await self._replace(actor)

    async def _replace(self, actor: RemoteActor) -> None:
        """Wait until what a lost actor left is settled; the first call begins that."""
        if actor.replaced is None:
            self._actors.remove(actor)
            actor.replaced = self._in_background(self._settle_lost(actor))
        await asyncio.shield(actor.replaced)

    async def _settle_lost(self, actor: RemoteActor) -> None:
        # Of a machine that cannot be reached Ray declares actors dead that still live: they must not store rows that others make too.
        self._ray.kill(actor.handle)
        await asyncio.to_thread(await_writers, self._store.folder, [actor.name])
        await self._store.writer.find_unrecorded()
        may_restart = actor.restarts < self._config.max_restarts
        n_left = len(self._actors) + may_restart
        what = "another is started" if may_restart else f"continuing with {n_left}"
        if not n_left:
            raise ServiceDiedError(
                "Ray", f"its last actor was lost, after {actor.restarts} restarts (max_restarts)"
            )
        self._shared.warn(f"Ray actor {actor.name} was lost: its groups go to others, {what}")
        if may_restart:
            self._in_background(self._start_again(actor.restarts + 1))

    async def choose(self) -> RemoteActor:
        """Return the actor with the fewest outstanding trajectories; waits while there is none."""
        while True:
            if usable := [each for each in self._actors if each.is_open and not each.is_lost]:
                return min(usable, key=lambda each: each.outstanding)
            self._is_changed.clear()
            await self._is_changed.wait()

    async def _start_again(self, restarts: int) -> None:
        """Start an actor in place of a lost one; if it does not start, the others continue, if there are any."""
        try:
            await self._start_actor(restarts)
        except ServiceStartError as error:
            if not self._actors:
                raise
            self._shared.warn(f"{error}; continuing with {len(self._actors)}")

    # Work

    def begin_step(self, step: int, see: SeeRows) -> "RemoteStep":
        self._step = max(self._step, step)
        return RemoteStep(self, step, see)

    async def end_step(self, step: int) -> Sequence[Metric]:
        metrics: list[Metric] = []
        for actor in list(self._actors):
            with suppress(ActorLostError):
                metrics += await actor.call("end_step", step) if actor.is_open else ()
        return merge_metrics(metrics)

    async def recover(
        self, lost: RemoteActor, dataset: str, step: int, ids: Sequence[str], columns: Sequence[str]
    ) -> Rows:
        """Wait until what a lost actor left is settled, and return those of the rows that it had stored."""
        await self._replace(lost)
        read = partial(read_chosen, self._store.folder, dataset, list(ids), list(columns), step=step)
        if dataset == "scores":
            read = partial(read, scorer=self._shared.scores_key)
        return rows_from_table(await asyncio.to_thread(read))

    async def close(self) -> None:
        """Have the actors store what is left, and end them."""
        self._pool.mirror = None
        for each in self._tasks:
            each.cancel()
        async with asyncio.TaskGroup() as closing:
            for actor in self._actors:
                closing.create_task(self._close(actor))
        await asyncio.to_thread(await_writers, self._store.folder)

    async def _close(self, actor: RemoteActor) -> None:
        with suppress(ActorLostError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                # Killed while it opens, it has stored nothing.
                if actor.is_open:
                    await actor.call("close", self._step)
        self._ray.kill(actor.handle)


class RemoteStep:
    """The groups of one step, in actors."""

    def __init__(self, executor: RayExecutor, step: int, see: SeeRows) -> None:
        self.executor, self.step, self.see = executor, step, see

    async def open_group(self, task: GroupTask) -> "RemoteGroup":
        return RemoteGroup(self, task)


class RemoteGroup:
    """The work of one group, all of it in one actor unless that is lost."""

    def __init__(self, step: RemoteStep, task: GroupTask) -> None:
        self.step, self.task = step, task
        self._actor: RemoteActor | None = None

    def trim(self, rows: Rows) -> Rows:
        return rows.select(ROLLOUT_COLUMNS if "n_completion_tokens" in rows.schema.names else SCORE_COLUMNS)

    def rollout(
        self, attempts: Sequence[Attempt], tickets: Sequence[SlotTicket], deadline: Deadline
    ) -> RolloutWork:
        prefix = f"{self.step.executor.run}.{self.task.group}"
        by_id = {f"{prefix}.{each.sample}.{each.attempt}": each for each in attempts}
        return RemoteRollout(self, by_id, tickets, deadline)

    def score(self, rollouts: Rows) -> ScoreWork:
        return RemoteScore(self, [str(each) for each in column_values(rollouts, "trajectory_id")])

    async def make_rows(
        self,
        dataset: str,
        columns: Sequence[str],
        ids: Sequence[str],
        ask: Callable[[RemoteActor, Sequence[str]], Awaitable[Rows]],
    ) -> Rows:
        """Have the actor make and store the rows of these trajectories, and return them; what a lost one lacks, another makes."""
        executor, found = self.step.executor, list[Rows]()
        while ids:
            if self._actor is None or self._actor.is_lost:
                self._actor = await executor.choose()
            actor = self._actor
            try:
                found.append(await ask(actor, ids))
                break
            except ActorLostError:
                # What it stored is kept, as by a flow that is resumed.
                rows = await executor.recover(actor, dataset, self.task.step, ids, columns)
            found.append(rows)
            stored = {str(each) for each in column_values(rows, "trajectory_id")}
            ids = [each for each in ids if each not in stored]
        parts = [each.replace_schema_metadata(None) for each in found if each.num_rows]
        return concat_rows(*parts) if parts else no_rows(dataset).select(columns)


# Not a dataclass: Prefect searches the fields of dataclasses among a task's parameters.
class RemoteRollout:
    """Trajectories of a group that an actor samples, by id."""

    __slots__ = ("_attempts", "_group", "_limit", "_tickets", "_timeout_s")

    def __init__(
        self,
        group: RemoteGroup,
        attempts: Mapping[str, Attempt],
        tickets: Sequence[SlotTicket],
        deadline: Deadline,
    ) -> None:
        self._group, self._attempts, self._tickets, self._limit = group, attempts, tickets, deadline.setting
        # An actor counts it from its own first slot: a group waits there until others have ended.
        self._timeout_s = deadline.at - asyncio.get_running_loop().time()

    async def sample(self) -> SampledChunk:
        """Wait until the trajectories are stored, and return their rows without tokens."""
        rows = await self._group.make_rows("rollouts", ROLLOUT_COLUMNS, list(self._attempts), self._ask)
        if (lost := rows_where_in(rows, "status", LOST_STATUSES)).num_rows:
            self._group.step.see(lost)
        return SampledChunk(rows, ())

    async def _ask(self, actor: RemoteActor, ids: Sequence[str]) -> Rows:
        task = replace(self._group.task, attempts=tuple(self._attempts[each] for each in ids))
        with actor.asked(task.group, self._tickets[len(self._tickets) - len(ids) :]):
            rows: Rows = await actor.call("sample", task, self._timeout_s, self._limit)
        return rows


class RemoteScore:
    """Stored rollouts of a group that an actor scores."""

    __slots__ = ("_group", "_ids")

    def __init__(self, group: RemoteGroup, ids: Sequence[str]) -> None:
        self._group, self._ids = group, ids

    async def score(self) -> ScoredChunk:
        """Wait until the scores are stored, and return their rows."""
        rows = await self._group.make_rows("scores", SCORE_COLUMNS, self._ids, self._ask)
        self._group.step.see(rows)
        return ScoredChunk(rows)

    async def _ask(self, actor: RemoteActor, ids: Sequence[str]) -> Rows:
        task = self._group.task
        rows: Rows = await actor.call("score", task.step, task.group, ids)
        return rows


def count_slots(config: RunConfig) -> int:
    """Return the slots that the flow grants: with actors those of WAITING_GROUPS more each, which wait in the actor.

    The shares of `rollout.max_in_flight` bound what actors play at once.
    """
    rollout = config.rollout
    waiting = (
        WAITING_GROUPS * config.executor.actors * rollout.group_size if config.executor.kind == "ray" else 0
    )
    return rollout.max_in_flight + waiting


@dataclass(frozen=True, slots=True)
class SharedRun:
    """What the executor uses of an open run.

    Attributes:
        scores_key: NAME@VERSION under which scores are stored.
        warn: prints that an actor was lost.
    """

    config: RunConfig
    store: OpenRun
    pool: ServerPool
    admission: Admission
    scores_key: str
    warn: Callable[[str], None] = say


@asynccontextmanager
async def open_ray_executor(shared: SharedRun, model: Path) -> AsyncIterator[RayExecutor]:
    """Connect to a Ray cluster, or start one, and start the actors of a run there; `model` is the start model's folder.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at executor.address.
        ServiceStartError: the cluster, or an actor, did not start.
    """
    config, logs = shared.config, shared.store.folder.logs
    async with (
        connect_cluster(config.executor, logs, config.start_timeout_s) as ray,
        asyncio.TaskGroup() as background,
    ):
        executor = RayExecutor(ray, background, shared, model)
        try:
            await executor.start()
            yield executor
        finally:
            await executor.close()
