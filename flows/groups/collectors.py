"""The collectors of a run, as the run sees them: who is there, and which groups each has."""

import asyncio
import hmac
import itertools
import time
from collections.abc import Coroutine, Sequence
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from flows.groups.collector_messages import (
    Appended,
    Done,
    End,
    FromCollector,
    Hello,
    Message,
    ServerFailed,
    Servers,
    Spans,
    Stored,
    Verdict,
    Vouch,
    encoded,
    from_collector,
)
from flows.groups.group import StepCollection
from flows.groups.lease import Lease
from flows.running.run import Run
from flows.running.submission import Submission
from flows.ui.progress import say
from tasks.errors import CollectorGoneError, ConnectionLostError, RollmillError, TransientRequestError
from tasks.observe.metrics import Metric
from tasks.observe.spans import Span
from tasks.rollout.admission import Place
from tasks.score.scoring import scorable
from tasks.serve.client import VllmClient
from tasks.store.parcels import unpacked
from tasks.store.rows import Rows, values
from tasks.store.step import GroupPlan

COLLECTOR = "collector/"
"""How collectors are called where they tell of their own time; their number follows."""


class Member:
    """One collector: what it has, and what it is to be told."""

    def __init__(self, name: str, connection: ServerConnection) -> None:
        self.name, self.connection = name, connection
        self.leases: dict[int, Lease] = {}
        # Of each group in its hands (as many trajectories as rollout.max_in_flight grants) a lease, a grant for each place,
        # and an answer for each message that it sent and that waits for one.
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()

    @property
    def n_left(self) -> int:
        """Trajectories that it has in hand."""
        return sum(lease.n_left for lease in self.leases.values())

    def send(self, message: Message) -> None:
        """Tell it something, in order."""
        self._outbox.put_nowait(message)

    async def post(self) -> None:
        """Send what there is to be told, until `End` was sent."""
        while True:
            message = await self._outbox.get()
            await self.connection.send(encoded(message))
            if isinstance(message, End):
                return


class Collectors:
    """Hands groups out to those that have joined; used from the run's event loop.

    Args:
        run: the run.
        token: that a collector must show.

    Attributes:
        members: those that have joined and are there.
    """

    def __init__(self, run: Run, token: str) -> None:
        self._run, self._token = run, token
        self.members: list[Member] = []
        self._numbers = itertools.count()
        self._answering: set[asyncio.Task[None]] = set()
        self._has_joined = asyncio.Event()
        self._patience_ends = asyncio.get_running_loop().time() + run.config.rollout.collector_start_s
        self._is_telling = False
        self._submitted = Submission("collectors")
        self._is_booked = False
        run.pool.on_change = self._changed

    def listen(self) -> serve:
        """The server that collectors connect to, at any free port; an async context manager."""
        rollout = self._run.config.rollout
        return serve(
            self._joined,
            rollout.collector_host,
            0,
            process_request=self._refused,
            compression=None,
            max_size=None,
            ping_interval=rollout.collector_timeout_s / 3,
            ping_timeout=rollout.collector_timeout_s * 2 / 3,
        )

    async def are_there(self) -> bool:
        """True when a collector is there; the first time, one is waited for until rollout.collector_start_s is over."""
        if not self._has_joined.is_set():
            try:
                async with asyncio.timeout_at(self._patience_ends):
                    await self._has_joined.wait()
            except TimeoutError:
                self._has_joined.set()
                say(
                    "no collector has joined within rollout.collector_start_s = "
                    f"{self._run.config.rollout.collector_start_s:g} s: is a worker running for the work pool of "
                    f"{self._run.config.rollout.collector_deployment}? The run's own process collects until one joins"
                )
        return bool(self.members)

    def hand_out(self, collection: StepCollection, plan: GroupPlan, places: Sequence[Place]) -> Lease | None:
        """Hand a group to the collector that has the fewest trajectories in hand; None when none is there."""
        if not self.members:
            return None
        member = min(self.members, key=lambda each: each.n_left)
        lease = Lease(next(self._numbers), collection, plan, places, self._run.admission, member.send)
        member.leases[lease.number] = lease
        lease.begin()
        return lease

    def take_back(self, lease: Lease) -> None:
        """Hear no more of a lease."""
        for member in self.members:
            member.leases.pop(lease.number, None)

    def metrics(self) -> list[Metric]:
        """How long it took until the collectors had joined, and how far apart they did; from when all have."""
        return self._submitted.metrics("submit/collectors_") if self._is_booked else []

    async def end(self, *, is_finished: bool) -> None:
        """Let all of them go."""
        self._book()
        for member in self.members:
            member.send(End(is_finished))
        closing = [asyncio.create_task(member.connection.wait_closed()) for member in self.members]
        if closing:
            # No asyncio.timeout: this runs while a failed TaskGroup's error is on its way, see one_error.
            await asyncio.wait(closing, timeout=self._run.config.serve.stop_grace_s)
        for each in closing:
            each.cancel()

    def _book(self) -> None:
        """Book the time until the last collector joined, once."""
        if not self._is_booked:
            self._is_booked = True
            self._submitted.book()

    def _refused(self, connection: ServerConnection, request: Request) -> Response | None:
        shown = request.headers.get("Authorization", "")
        if hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
            return None
        return connection.respond(HTTPStatus.UNAUTHORIZED, "this run has another token\n")

    async def _joined(self, connection: ServerConnection) -> None:
        """Hear a collector until it is gone; what it has then is handed out again."""
        hello = from_collector.decode(await connection.recv(decode=False))
        if not isinstance(hello, Hello) or hello.epoch != self._run.store.manifest.epoch:
            await connection.close(reason="this is another start of the run")
            return
        member, reason = Member(hello.name, connection), "its connection is closed"
        posting = asyncio.create_task(member.post())
        member.send(self._servers())
        self.members.append(member)
        self._has_joined.set()
        self._submitted.started(member.name, time.time_ns())
        if self._submitted.n_started >= self._run.config.rollout.collectors:
            self._book()
        say(f"{member.name} has joined: {len(self.members)} of {self._run.config.rollout.collectors}")
        try:
            async for content in connection:
                assert isinstance(content, bytes)
                self._hear(member, from_collector.decode(content))
        except ConnectionClosed as error:
            reason = str(error)
        finally:
            self.members.remove(member)
            posting.cancel()
            if member.leases:
                gone = CollectorGoneError(member.name, reason)
                say(f"{gone}; what it had not finished of {len(member.leases)} groups goes on elsewhere")
            for lease in [*member.leases.values()]:
                if not lease.over.done():
                    lease.over.set_exception(CollectorGoneError(member.name, reason))

    def _hear(self, member: Member, message: FromCollector) -> None:
        match message:
            case Appended(lease=number) if lease := member.leases.get(number):
                self._answer(self._store(member, lease, message))
            case Done(lease=number) if (lease := member.leases.get(number)) and not lease.over.done():
                lease.over.set_result(None)
            case Spans(spans=spans):
                for each in spans:
                    self._run.store.spans.recorder.add(_as_ours(each))
            case Vouch():
                self._answer(self._vouch(member, message))
            case ServerFailed():
                kind = ConnectionLostError if message.is_lost else TransientRequestError
                if server := self._server(message.server):
                    self._run.pool.report(server, kind(message.error))

    async def _store(self, member: Member, lease: Lease, message: Appended) -> None:
        """Store rows, and say so; what cannot be stored ends the group, and with it the run."""
        try:
            rows = unpacked(message.rows)
            await lease.take(message.dataset, rows)
            member.send(Stored(message.ticket))
            if message.dataset == "rollouts":
                await self._hand_on(lease.step, rows)
        except RollmillError as error:
            if not lease.over.done():
                lease.over.set_exception(error)

    async def _hand_on(self, step: int, rollouts: Rows) -> None:
        """Let those know of stored rollouts who want them before their step is trained."""
        sampled = scorable(rollouts)
        if self._run.recomputing is not None:
            self._run.recomputing.add(step, [str(each) for each in values(sampled, "trajectory_id")])
        if self._run.reference is not None:
            await self._run.reference.ask(step, sampled)

    async def _vouch(self, member: Member, message: Vouch) -> None:
        """Say whether an answer may be kept, as soon as that is known."""
        server, error = self._server(message.server), ""
        try:
            if server is None:
                raise TransientRequestError(f"{message.server} is no server of the run")
            await self._run.pool.vouch_to_follower(server, message.versions, message.cuts)
        except TransientRequestError as refused:
            error = str(refused)
        member.send(Verdict(message.ticket, error))

    def _server(self, url: str) -> VllmClient | None:
        return next((each for each in self._run.pool.known() if each.url == url), None)

    def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _changed(self) -> None:
        """Tell all of them of the servers, once for all changes of one moment."""
        if not self._is_telling:
            self._is_telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_telling = False
        for member in self.members:
            member.send(self._servers())

    def _servers(self) -> Servers:
        pool, is_launched = self._run.pool, not self._run.config.serve.urls
        return Servers(
            pool.states(), {each.url: each.api_key for each in pool.known()} if is_launched else {}
        )


def _as_ours(told: Span) -> Span:
    """A collector's span as one of the flow's: of groups, whose lanes nobody else has, or of its own lanes."""
    if not told.process.startswith(COLLECTOR):
        return told
    is_of_group = told.lane[:1].isdigit()
    return told._replace(process="flow", lane=told.lane if is_of_group else f"{told.process} {told.lane}")


def port_of(server: Server) -> int:
    """Where a server listens."""
    return int(next(iter(server.sockets)).getsockname()[1])
