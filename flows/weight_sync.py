"""The trainer's weights to the servers of a run: sent to all at once, compared with the trainer's one by one."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from flows.parity import Parity
from flows.progress import say
from flows.run import Run
from tasks.errors import ParityError, SyncError
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.sync.drive import Dispatch, Route, find_route
from tasks.sync.order import WeightAnswer, WeightOffer
from tasks.sync.task import send_weights
from tasks.train.client import TrainerClient


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One server's sync.

    Attributes:
        sent_bytes: to each of its workers; 0 when only the version's name was sent.
        transfer_s: seconds until the last byte was there.
        held_s: seconds that its requests were held.
        parity_s: seconds that the comparison took.
        difference: largest difference in log-probability to the trainer, in nats; NaN when not compared.
    """

    server: str
    sent_bytes: int = 0
    transfer_s: float = 0.0
    held_s: float = 0.0
    parity_s: float = 0.0
    difference: float = float("nan")


Take = Callable[[VllmClient, Dispatch], Coroutine[Any, Any, object]]
"""Has a server take weights that are being sent."""


class WeightSync:
    """Sends weights to servers, whose routes it keeps, with the trainer's weights held still.

    Args:
        run: the run that the servers sample for.
        trainer: its trainer.
        parity: compares a server with it.

    Attributes:
        calls: commands to the trainer and requests to servers so far, without those of comparisons.
    """

    def __init__(self, run: Run, trainer: TrainerClient, parity: Parity) -> None:
        self._run, self._trainer, self._parity = run, trainer, parity
        self.calls = 0
        self._offer: tuple[int, WeightOffer] | None = None
        self._routes: dict[VllmClient, tuple[int, Route]] = {}
        self._told: dict[VllmClient, str] = {}

    def is_joined(self, server: VllmClient, version: PolicyVersion) -> bool:
        """True when a server has a route to the trainer of this incarnation."""
        return server in self._routes and self._routes[server][0] == version.incarnation

    def forget(self, server: VllmClient) -> None:
        """Take a server for a new one: its route, its tokenizer and chat template are asked for again."""
        self._routes.pop(server, None)

    async def join(self, server: VllmClient, version: PolicyVersion) -> None:
        """See to it that a server may take weights: it answers, has our tokenizer, and a route to it is known.

        Raises:
            SyncError, RequestError: it does not answer.
            ConfigError: it has another tokenizer or chat template, or the transport that is set cannot reach it.
        """
        if self.is_joined(server, version):
            return
        if not await server.is_healthy():
            raise SyncError(f"server {server.url} does not answer /health")
        await self._parity.check_tokenizer(server)
        self.calls += 1
        route, reason = await find_route(server, await self._offered(version), self._run.config.sync)
        self._routes[server] = version.incarnation, route
        text = f"server {server.url}: weights travel by {route.transport}, since {reason}"
        if self._told.get(server) != text:
            self._told[server] = text
            say(text)

    async def send(self, servers: Sequence[VllmClient], version: PolicyVersion, take: Take) -> None:
        """Send to servers that have joined; `take` has each of them take the weights, and is awaited.

        The routes of servers that do not take them are dropped, also when this is cancelled. With several servers the
        trainer scores the tokens of the comparison first, so that no server waits for the slowest to be compared.

        Raises:
            ServiceDiedError: the trainer is gone.
        """
        if not servers:
            return
        routes = {server: self._routes.pop(server)[1] for server in servers}
        if len(servers) > 1:
            await self._parity.expect(version)
        offer, config = await self._offered(version), self._run.config.sync
        dispatch = Dispatch(self._trainer, offer, routes, str(version), config)
        self._run.recording.started()
        self.calls += 1
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(send_weights(dispatch, str(version)))
            for server in servers:
                group.create_task(take(server, dispatch))
        failed = {each.server for each in sending.result() if each.error}
        for server in dispatch.taken:
            if server.url not in failed:
                self._routes.setdefault(server, (version.incarnation, routes[server]))

    async def take(self, server: VllmClient, version: PolicyVersion, dispatch: Dispatch) -> SyncReport:
        """Have a server take weights that are being sent, and compare it; they are sent once more if it differs.

        Raises:
            SyncError, RequestError: it did not take them, differs still, or reports another version.
        """
        answer = await self._taken(server, dispatch)
        started = time.perf_counter()
        try:
            difference = await self._parity.compare(server, version)
        except ParityError as error:
            say(f"{error}; sending it once more")
            await self.join(server, version)
            await self.send([server], version, self._taken)
            difference = await self._parity.compare(server, version)
        parity_s = time.perf_counter() - started
        self.calls += 1
        if (reported := await server.version()) != str(version):
            raise SyncError(f"server {server.url} reports version {reported} after a sync of {version}")
        return SyncReport(server.url, answer.bytes, answer.received_s, answer.held_s, parity_s, difference)

    async def _taken(self, server: VllmClient, dispatch: Dispatch) -> WeightAnswer:
        self.calls += 1
        return await dispatch.take(server)

    async def _offered(self, version: PolicyVersion) -> WeightOffer:
        """What the trainer has to give, which is asked once for each of its incarnations."""
        if self._offer is None or self._offer[0] != version.incarnation:
            self.calls += 1
            self._offer = version.incarnation, await self._trainer.offer()
        return self._offer[1]
