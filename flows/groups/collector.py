"""A collector: samples and scores groups of a run in another process, which stores what comes of them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import State
from prefect.blocks.system import Secret
from prefect.logging import get_run_logger
from prefect.states import Cancelled
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from flows.config import RunConfig
from flows.failure import one_error
from flows.groups.collecting import Collecting
from flows.groups.collector_messages import (
    Appended,
    Done,
    End,
    Grant,
    Group,
    Hello,
    Message,
    ServerFailed,
    Servers,
    Spans,
    Stored,
    ToCollector,
    Verdict,
    Vouch,
    encoded,
    to_collector,
)
from flows.groups.group import GroupCollection, StepCollection
from flows.running.failures import FailureWatch
from flows.running.vitals import Vitals
from flows.ui.picture import picture_of
from flows.ui.progress import say
from flows.ui.recording import Recording
from tasks.config import StageConfig, setting
from tasks.errors import ConnectionLostError, TransientRequestError
from tasks.observe.spans import Recorder, current_lane, within
from tasks.observe.spans import recording as spans_recorded
from tasks.rollout.admission import Admission
from tasks.rollout.env_client import open_environment
from tasks.rollout.pool_sampler import PoolSampler
from tasks.rollout.sampling import Player
from tasks.rollout.tokens import ChatTokenizer
from tasks.score.scoring import Scoring
from tasks.serve.client import VllmClient
from tasks.serve.pool import ServerPool
from tasks.store.layout import PartitionValue
from tasks.store.parcels import packed, unpacked
from tasks.store.rows import Rows
from tasks.store.step import Attempt, GroupPlan


class JoinConfig(StageConfig):
    """The run that a collector collects for."""

    url: str = setting("", "Where the run listens for its collectors; empty: no run is joined.")
    token_block: str = setting("", "Secret block that holds the token which the run asks for.")
    run: str = setting("", "Id of the run.")
    epoch: int = setting(0, "Epoch of the run's writer.", ge=0)
    number: int = setting(0, "Number of the collector, from 1.", ge=0)
    model: str = setting("", "Folder of the run's start model, for its tokenizer.")
    logs: str = setting("", "Folder for the logs of worker processes.")


NO_RUN = JoinConfig()


async def collect_for(config: RunConfig, join: JoinConfig) -> str | State[str]:
    """Collect for a run until it says that there is nothing more, or is gone.

    Returns:
        How it went, in words; when the run was stopped, or is gone, a state that says so.
    """
    recording = Recording(config.observe)
    try:
        with Vitals(config.observe).watching(), spans_recorded(Recorder(f"collector/{join.number}")):
            async with _opened(config, join, recording) as collector:
                is_finished = await collector.work()
        why = "the run was stopped"
    except (ConnectionClosed, WebSocketException, OSError) as error:
        is_finished, why = False, f"the run at {join.url} is gone: {error}"
    if not is_finished:
        say(f"nothing more is collected: {why}")
        return Cancelled(message=f"Nothing more is collected: {why}.")
    await recording.wait_until_recorded()
    return f"{collector.n_done} groups collected"


class Link:
    """The connection to the run: what is sent waits for its answer here; an Authority, and an Appender."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        # The rows of trajectories that the run has granted places for, and a few words of each group: whose tasks wait
        # until their rows are stored, and take no new place before.
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, message: Message) -> None:
        """Tell the run something, in order."""
        self._outbox.put_nowait(message)

    async def post(self) -> None:
        """Send what there is to be told, for ever."""
        while True:
            await self._connection.send(encoded(await self._outbox.get()))

    async def hear(self) -> ToCollector:
        """The next thing that the run says."""
        said: ToCollector = to_collector.decode(await self._connection.recv(decode=False))
        return said

    def ticket(self) -> tuple[int, "asyncio.Future[Any]"]:
        """A number for what is to be answered, and its answer."""
        number = next(self._tickets)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        return number, answer

    def answered(self, ticket: int, answer: str = "") -> None:
        """Take up an answer."""
        if not (waiting := self._waiting.pop(ticket)).done():
            waiting.set_result(answer)

    def append(self, lease: int, dataset: str, rows: Rows) -> "asyncio.Future[Any]":
        """Hand rows to the run; what is returned is done when they are stored."""
        number, stored = self.ticket()
        self.send(Appended(number, lease, dataset, packed(rows)))
        return asyncio.shield(stored)

    async def vouch(self, url: str, versions: Collection[str], cuts: int) -> None:
        """See ServerPool.vouch."""
        number, verdict = self.ticket()
        self.send(Vouch(number, url, list(versions), cuts))
        if error := await verdict:
            raise TransientRequestError(error)

    def report(self, url: str, error: TransientRequestError) -> None:
        """See ServerPool.report."""
        self.send(ServerFailed(url, str(error), isinstance(error, ConnectionLostError)))


class _Writer:
    """Hands the rows of one group to the run."""

    def __init__(self, link: Link, lease: int) -> None:
        self._link, self._lease = link, lease

    def append(self, dataset: str, rows: Rows, **partition: PartitionValue) -> "asyncio.Future[Any]":
        """See Appender; partitions are known to the run."""
        return self._link.append(self._lease, dataset, rows)


class Collector:
    """Collects the groups that it is given, side by side.

    Attributes:
        n_done: groups that are done.
    """

    def __init__(self, link: Link, run: Collecting) -> None:
        self._link, self._run = link, run
        self._slots: dict[int, Admission] = {}
        self._servers: dict[str, VllmClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.n_done = 0

    async def work(self) -> bool:
        """Collect until there is nothing more; returns False when the run was stopped.

        Raises:
            ConnectionClosed: the run is gone.
        """
        try:
            with one_error():
                async with asyncio.TaskGroup() as tasks:
                    self._start(tasks, self._link.post())
                    end = await self._served(tasks)
                    for task in self._tasks:
                        task.cancel()
            return end.is_finished
        finally:
            for server in self._servers.values():
                await server.close()

    def _start(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = tasks.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _served(self, tasks: asyncio.TaskGroup) -> End:
        while True:
            match await self._link.hear():
                case Servers() as servers:
                    self._follow(servers)
                case Group() as group:
                    self._slots[group.lease] = Admission(group.granted, reuses=False)
                    self._start(tasks, self._collect(group))
                case Grant(lease=lease, n=n):
                    if slots := self._slots.get(lease):
                        slots.add(n)
                case Stored(ticket=ticket):
                    self._link.answered(ticket)
                case Verdict(ticket=ticket, error=error):
                    self._link.answered(ticket, error)
                case End() as end:
                    return end

    async def _collect(self, group: Group) -> None:
        writer = _Writer(self._link, group.lease)
        run = replace(self._run, admission=self._slots[group.lease], writer=writer)
        plan = GroupPlan(
            group=group.group,
            to_sample=tuple(Attempt(group.group, *each) for each in group.to_sample),
            rollouts=unpacked(group.rollouts),
            scores=unpacked(group.scores),
            to_score=unpacked(group.to_score),
            is_judged=False,
        )
        n_planned = max(1, run.config.rollout.group_size)
        failures = FailureWatch(group.step, n_planned, max_share=float("inf"), logger=get_run_logger)
        with within(step=group.step):
            await GroupCollection(StepCollection(run, group.step, failures), plan).collect()
        del self._slots[group.lease]
        self.n_done += 1
        if lane := current_lane():
            self._link.send(Spans(list(lane.recorder.take())))
        self._link.send(Done(group.lease))

    def _follow(self, servers: Servers) -> None:
        for url, (is_admitted, cuts) in servers.states.items():
            if url not in self._servers:
                self._servers[url] = VllmClient(url, self._run.config.serve, servers.keys.get(url))
            self._run.pool.follow(self._servers[url], is_admitted=is_admitted, cuts=cuts)


@asynccontextmanager
async def _opened(config: RunConfig, join: JoinConfig, recording: Recording) -> AsyncIterator[Collector]:
    """Everything that sampling and scoring need, and then the connection to the run."""
    logs, timeout_s = Path(join.logs), config.rollout.collector_timeout_s
    block: Any = await Secret.aload(join.token_block)
    async with (
        Scoring(config.score, join.run) as scoring,
        open_environment(config.rollout, logs=logs, stop_grace_s=config.serve.stop_grace_s) as environment,
        connect(
            join.url,
            additional_headers={"Authorization": f"Bearer {block.get()}"},
            compression=None,
            max_size=None,
            proxy=None,
            open_timeout=timeout_s,
            ping_interval=timeout_s / 3,
            ping_timeout=timeout_s * 2 / 3,
        ) as connection,
    ):
        link = Link(connection)
        pool, tokenizer = ServerPool(link), ChatTokenizer.load(Path(join.model))
        sampler = PoolSampler(
            pool,
            config.rollout,
            join.run,
            config.serve.request_timeout_s,
            stop_token_ids=tokenizer.stop_ids(environment.stop),
        )
        run = Collecting(
            id=join.run,
            config=config,
            environment=environment,
            scoring=scoring,
            player=Player(
                environment=environment,
                tokenizer=tokenizer,
                sampler=sampler,
                max_tokens=config.serve.max_model_len,
                timeout_s=config.rollout.trajectory_timeout_s,
            ),
            pool=pool,
            picture=picture_of(config.observe.task_runs, recording),
            admission=Admission(0),
            writer=_Writer(link, -1),
        )
        link.send(Hello(f"collector {join.number}", join.epoch))
        yield Collector(link, run)
