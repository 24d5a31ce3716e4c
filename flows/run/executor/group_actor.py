"""A Ray actor: samples and scores groups of a run in a separate process, stores their rows, and returns references and small rows."""

import asyncio
import os
import pickle
import sys
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.run.executor.actor_messages import (
    ROLLOUT_COLUMNS,
    SCORE_COLUMNS,
    ActorReply,
    ActorReport,
    ActorStart,
    Changes,
)
from rollmill.flows.run.executor.group_work import GroupTask
from rollmill.flows.run.executor.local_executor import LocalExecutor, LocalStep
from rollmill.flows.run.run_environment import environment_metrics, open_environments
from rollmill.tasks.errors import ConnectionLostError, TransientRequestError
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.spans import Recorder, recording
from rollmill.tasks.observe.step_clock import FLOW
from rollmill.tasks.rollout.admission import ROLLOUT, Admission
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.episode import Deadline
from rollmill.tasks.serve.server_pool import ServerChange, ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read_trajectories
from rollmill.tasks.store.rows import (
    Rows,
    column_values,
    concat_rows,
    no_rows,
    rows_from_table,
    rows_where_in,
    rows_without,
    sort_rows,
)
from rollmill.tasks.store.run.joined_run import JoinedRun
from rollmill.tasks.store.span_rows import rows_by_step

# Seconds after which an actor reports although nothing happened: the flow sees by the answer that it lives.
REPORT_S = 5.0
MOST_GROUPS = 512
"""Groups whose rollouts an actor keeps until they are scored; those of others are read from the data set."""


class Happenings:
    """Collects what the flow is to know of an actor, until the next report."""

    def __init__(self) -> None:
        self._finished: Counter[int] = Counter()
        self._alarms: dict[str, bool] = {}
        self._is_new = asyncio.Event()

    def finish(self, groups: Sequence[int]) -> None:
        """Note that a trajectory of each of these groups has ended."""
        self._finished.update(groups)
        self._is_new.set()

    def alarm(self, url: str, *, is_out: bool) -> None:
        """Note that a server failed a request; `is_out`: it gets no more."""
        self._alarms[url] = self._alarms.get(url, False) or is_out
        self._is_new.set()

    async def take(self) -> ActorReport:
        """Wait until there is something to report, at most REPORT_S, and return it."""
        try:
            async with asyncio.timeout(REPORT_S):
                await self._is_new.wait()
        except TimeoutError:
            return ActorReport()
        self._is_new.clear()
        report = ActorReport(dict(self._finished), self._alarms)
        self._finished, self._alarms = Counter(), {}
        return report


class FollowingPool(ServerPool):
    """The servers of the flow's pool: the flow says which there are, and gets reports of those that fail."""

    def __init__(self, happenings: Happenings, config: RunConfig, client: str) -> None:
        super().__init__(client)
        self._happenings, self._config = happenings, config
        self._clients: dict[str, VllmClient] = {}

    def note_failure(self, server: VllmClient, error: TransientRequestError) -> None:
        super().note_failure(server, error)
        is_out = isinstance(error, ConnectionLostError) or self.is_suspect(server)
        self._happenings.alarm(server.url, is_out=is_out)

    async def follow(self, change: ServerChange) -> None:
        """Make a change of the flow's pool here."""
        server = self._clients.get(change.url)
        if server is None:
            server = self._clients[change.url] = VllmClient(change.url, self._config.serve, change.api_key)
        match change.kind:
            case "admit":
                self.note_success(server)
                self.admit(server)
            case "mark_unverified":
                self.mark_unverified(server, change.version)
            case "reject":
                self.reject(server)
            case "remove":
                self.remove(server)
            case "end_requests":
                await server.close()

    async def close(self) -> None:
        """Close the connections to all servers."""
        for server in self._clients.values():
            await server.close()


class ActorStep(LocalStep):
    """The groups of a step in an actor, which reports each trajectory that ends."""

    def __init__(self, executor: LocalExecutor, step: int, happenings: Happenings) -> None:
        super().__init__(executor, step, see=lambda rows: None)
        self._happenings = happenings

    def store_rollouts(self, rows: Rows) -> Awaitable[None]:
        self._happenings.finish([int(str(each)) for each in column_values(rows, "group")])
        return super().store_rollouts(rows)


class GroupActor:
    """Samples and scores groups of a run; its methods are called by the flow, through Ray.

    Whatever it returns is stored: rows that were lost with an actor are made again, those that it returned never.
    """

    def __init__(self, start: ActorStart) -> None:
        self._start = start
        log = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(start.cwd)
        sys.path += [each for each in start.path if each not in sys.path]
        self._config = RunConfig.model_validate_json(start.settings)
        self._folder = RunFolder(start.location)
        # What is recorded here are the flow's groups and trajectories, as with one process.
        self._recorder = Recorder(FLOW)
        self._n_calls = count()
        self._stack = AsyncExitStack()
        self._joined = JoinedRun(self._folder, start.run, start.epoch, start.name)
        self._steps: dict[int, ActorStep] = {}
        # Rollouts that are not scored yet, by group; the oldest first.
        self._kept: dict[int, Rows] = {}

    async def do(self, method: str, arguments: bytes, next_shard: int = 0) -> bytes:
        """Call a method by its name, with pickled arguments; returns its pickled result.

        `next_shard` is the number that the flow's next shard gets: what is stored from now on sorts after what the flow has replaced.
        """
        self._joined.writer.count_from(next_shard)
        return pickle.dumps(await getattr(self, method)(*pickle.loads(arguments)))

    async def open(self, changes: Changes) -> ActorReply[int]:
        """Open the environments and the run's data sets; returns the process id. `changes` make the pool of servers."""
        start = self._start
        self._happenings = Happenings()
        self._pool = FollowingPool(self._happenings, self._config, f"actor {start.name}")
        # Before anything that waits: calls with later changes run while this one does.
        await self.change_servers(changes)
        with self._record():
            await self._stack.enter_async_context(self._joined)
            self._stack.push_async_callback(self._pool.close)
            rollout = self._config.rollout
            tokenizer = await asyncio.to_thread(
                ChatTokenizer.load, Path(start.model), rollout.chat_template, rollout.chat_template_kwargs
            )
            environments = await open_environments(
                self._config,
                start.run,
                self._folder,
                tokenizer,
                self._pool,
                self._stack,
                logs=self._folder.logs / f"actor-{start.name}",
            )
            self._admission = Admission(start.slots)
            self._executor = LocalExecutor(
                start.run, self._config, environments, self._admission, self._joined.writer
            )
        return self._reply(os.getpid())

    async def change_servers(self, changes: Changes) -> None:
        """Make changes of the flow's pool of servers here."""
        with self._record():
            for each in changes:
                await self._pool.follow(each)

    async def sample(self, task: GroupTask, timeout_s: float, limit: str) -> ActorReply[Rows]:
        """Sample trajectories of a group, each once it has a slot, and return their rows in ROLLOUT_COLUMNS when they are stored.

        They are cut `timeout_s` seconds after the first has a slot; `limit` names that limit in their errors.
        """
        with (
            self._record(task.step, task.group),
            self._admission.request_slots(len(task.attempts), (task.step, ROLLOUT)) as tickets,
        ):
            work = await self._step(task.step).open_group(task)
            # The group may wait for others; its own limit does not count that.
            await tickets[0].wait()
            deadline = Deadline(asyncio.get_running_loop().time() + timeout_s, limit)
            with self._joined.writer.expect_rows():
                sampled = await work.rollout(task.attempts, tickets, deadline).sample()
            await asyncio.gather(*sampled.acknowledgements)
        self._pool.forget(task.group)
        kept = self._kept.pop(task.group, None)
        self._kept[task.group] = sampled.rows if kept is None else concat_rows(kept, sampled.rows)
        if len(self._kept) > MOST_GROUPS:
            del self._kept[next(iter(self._kept))]
        return self._reply(sampled.rows.select(ROLLOUT_COLUMNS))

    async def score(self, step: int, group: int, ids: Sequence[str]) -> ActorReply[Rows]:
        """Score stored rollouts of a group, and return the rows in SCORE_COLUMNS when they are stored."""
        with self._record(step, group):
            kept = self._kept.pop(group, no_rows("rollouts"))
            rollouts = rows_where_in(kept, "trajectory_id", ids)
            if (rest := rows_without(kept, "trajectory_id", ids)).num_rows:
                self._kept[group] = rest
            if rollouts.num_rows != len(ids):
                table = await asyncio.to_thread(read_trajectories, self._folder, step, ids)
                rollouts = rows_from_table(table)
            work = await self._step(step).open_group(GroupTask(step, group, None, ()))
            with self._joined.writer.expect_rows():
                scored = await work.score(sort_rows(rollouts, "sample")).score()
            await asyncio.gather(*scored.acknowledgements)
        return self._reply(scored.rows.select(SCORE_COLUMNS))

    async def report(self) -> ActorReply[ActorReport]:
        """Wait until there is something to report, at most REPORT_S, and return it."""
        return self._reply(await self._happenings.take())

    async def end_step(self, step: int) -> ActorReply[Sequence[Metric]]:
        """Store the spans recorded so far, those without a step under `step`; return metrics since the last call."""
        await self._store_spans(step)
        self._steps = {each: work for each, work in self._steps.items() if each > step}
        # The flow counts the servers.
        served = [
            each for each in self._pool.metrics() if each.name not in ("serve/servers", "serve/removals")
        ]
        return self._reply([*environment_metrics(self._executor.environments), *served])

    async def close(self, step: int) -> ActorReply[None]:
        """End the environments, and store what is left."""
        await self._store_spans(step)
        # Those that are asked for later are not stored.
        await self._stack.aclose()
        return self._reply(None)

    def _step(self, step: int) -> ActorStep:
        if step not in self._steps:
            self._steps[step] = ActorStep(self._executor, step, self._happenings)
        return self._steps[step]

    async def _store_spans(self, step: int) -> None:
        taken = self._recorder.take()
        by_step = await asyncio.to_thread(rows_by_step, self._start.run, taken, step)
        appended = [self._joined.writer.append("spans", rows, step=each) for each, rows in by_step.items()]
        await asyncio.gather(*appended)

    @contextmanager
    def _record(self, step: int = -1, group: int | None = None) -> Iterator[None]:
        """Record spans of a call, in a lane of its group that no other call has."""
        lane = f"{'main' if group is None else group}/{self._start.name}.{next(self._n_calls)}"
        with recording(self._recorder, step=step, lane=lane):
            yield

    def _reply(self, result: Any) -> ActorReply[Any]:
        return ActorReply(result, self._joined.take_events())
