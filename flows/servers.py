"""The vLLM servers of a run: kept at the policy's current version, verified, set aside when they fail."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from flows.failure import one_error
from flows.parity import Parity
from flows.progress import say
from flows.run import Run
from flows.services import ServerService
from flows.weight_sync import SyncReport, WeightSync
from tasks.errors import RequestError, RollmillError, ServiceDiedError, SyncError
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.sync.drive import Dispatch
from tasks.train.client import TrainerClient

Result = TypeVar("Result")


class Servers:
    """Brings servers to the trainer's version; a server is in the pool only while it is there.

    `bring_up` and `rejoin` are called with the trainer's weights held still.

    Attributes:
        run: the run that they sample for.
        every: all servers of the run.
        failed: those that are being brought back, by their watchers; how they failed.
        mute: those of them that answer and cannot sample.
        lost: those that were given up.
        are_up: set when all have been brought up for the first time.
    """

    def __init__(self, run: Run, trainer: TrainerClient, servers: Sequence[ServerService]) -> None:
        self.run, self._trainer = run, trainer
        self.every = tuple(servers)
        self.failed: dict[ServerService, str] = {}
        self.mute: set[ServerService] = set()
        self.lost: set[ServerService] = set()
        self.are_up = asyncio.Event()
        self._sync = WeightSync(run, trainer, Parity(run, trainer))
        self._verified: dict[
            ServerService, str
        ] = {}  # the name of the weights that a server is known to have

    async def bring_up(self, version: PolicyVersion, *, only_name: bool = False) -> list[SyncReport]:
        """Give every server the trainer's weights, all at once, or the version's name alone.

        One that fails is left to its watcher; those that have failed before are not waited for.
        """
        servers = [each for each in self.every if each not in self.failed and each not in self.lost]
        with one_error():
            named = [each for each in servers if only_name and self._sync.is_joined(each.client, version)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._survives(each, self._name(each, version))) for each in named]
            ready = await self._ready([each for each in servers if each not in named], version)
            reports = await self._send(ready, version)
        self.are_up.set()
        return [*(report for task in tasks if (report := task.result())), *reports]

    async def rejoin(self, server: ServerService, version: PolicyVersion) -> None:
        """Let a server in that failed and answers again; it gets the trainer's weights unless it still has them.

        Raises:
            SyncError, RequestError: it failed again.
            ConfigError: it has another tokenizer or chat template than before.
        """
        self.failed.pop(server, None)
        self.mute.discard(server)
        self.run.pool.answered(server.client)
        try:
            if await self._has(server, str(version)):
                self.run.pool.admit(server.client)
            else:
                self._sync.forget(server.client)
                await self._send_alone(server, version)
        except RollmillError as error:
            await self.fail(server, str(error))
            raise
        say(f"{server.name} is back, at version {version.version}")

    async def look_again(self, server: ServerService) -> None:
        """Let a server in that was set aside and still has its weights, and samples when that was in doubt.

        While it gets new ones, it is let in by who sends them.
        """
        verified = self._verified.get(server)
        if verified is None or server in self.failed:
            return
        has_weights = await self._has(server, verified)
        can_sample = has_weights and await self._can_sample(server)
        if self._verified.get(server) != verified:
            return
        if can_sample:
            self.run.pool.admit(server.client)
        elif has_weights:
            self.mute.add(server)
            await self.fail(server, "it answers /health and fails generations")
        else:
            await self.fail(server, "it no longer has the policy's weights")

    async def fail(self, server: ServerService, reason: str) -> None:
        """Ask a server no more, cut its requests off, which go to others, and leave it to its watcher."""
        self.failed[server] = reason
        self._verified.pop(server, None)
        self.run.pool.set_aside(server.client)
        self.alarm(server).set()
        await server.client.close()

    def give_up(self, server: ServerService, reason: str, log_tail: str = "") -> None:
        """Go on without a server.

        Raises:
            ServiceDiedError: it was the last one.
        """
        self.lost.add(server)
        self.run.pool.set_aside(server.client)
        n_left = len(self.every) - len(self.lost)
        if not n_left:
            raise ServiceDiedError(server.name, reason, log_tail)
        say(f"{server.name}: {reason.splitlines()[0]}; going on with {n_left} of {len(self.every)} servers")

    def alarm(self, server: ServerService) -> asyncio.Event:
        """Set when there is reason to look whether a server has failed."""
        return self.run.pool.alarm(server.client)

    async def _has(self, server: ServerService, name: str) -> bool:
        """True when a server answers, and is known to have the weights of that name."""
        try:
            is_healthy = await server.client.is_healthy()
            return is_healthy and self._verified.get(server) == name == await server.client.version()
        except RequestError:
            return False

    async def _can_sample(self, server: ServerService) -> bool:
        """True when a server samples; one that has not failed many requests in a row is not asked."""
        if not self.run.pool.is_suspect(server.client):
            return True
        if not await server.client.can_sample():
            return False
        self.run.pool.answered(server.client)
        return True

    async def _ready(
        self, servers: Sequence[ServerService], version: PolicyVersion
    ) -> dict[VllmClient, ServerService]:
        """Those that may take weights, by their clients; the others are left to their watchers."""
        async with asyncio.TaskGroup() as group:
            joins = {
                each: group.create_task(self._survives(each, self._join(each, version))) for each in servers
            }
        return {each.client: each for each, join in joins.items() if join.result()}

    async def _join(self, server: ServerService, version: PolicyVersion) -> bool:
        await self._sync.join(server.client, version)
        return True

    async def _name(self, server: ServerService, version: PolicyVersion) -> SyncReport:
        """Tell a server that has the weights already their new name."""
        self._verified.pop(server, None)
        await server.client.set_version(str(version))
        self._let_in(server, version)
        return SyncReport(server.client.url)

    async def _send(
        self, servers: Mapping[VllmClient, ServerService], version: PolicyVersion
    ) -> list[SyncReport]:
        """Send to servers that are ready; each is compared and let in as soon as it has taken the weights."""
        reports: list[SyncReport] = []

        async def take(client: VllmClient, dispatch: Dispatch) -> None:
            server = servers[client]
            if report := await self._survives(server, self._take(server, version, dispatch)):
                reports.append(report)

        for server in servers.values():
            self._verified.pop(server, None)
        await self._sync.send(list(servers), version, take)
        return reports

    async def _take(self, server: ServerService, version: PolicyVersion, dispatch: Dispatch) -> SyncReport:
        report = await self._sync.take(server.client, version, dispatch)
        self._let_in(server, version)
        return report

    async def _survives(self, server: ServerService, attempt: Awaitable[Result]) -> Result | None:
        """What comes of an attempt; None when the server failed, which is left to its watcher then."""
        try:
            return await attempt
        except (SyncError, RequestError) as error:
            await self.fail(server, str(error))
            return None

    async def _send_alone(self, server: ServerService, version: PolicyVersion) -> None:
        self._verified.pop(server, None)
        await self._sync.join(server.client, version)
        with one_error():
            await self._sync.send(
                [server.client], version, lambda _, dispatch: self._take(server, version, dispatch)
            )

    def _let_in(self, server: ServerService, version: PolicyVersion) -> None:
        if server in self.failed:
            raise SyncError(f"server {server.client.url} failed during a sync: {self.failed[server]}")
        self._verified[server] = str(version)
        self.run.pool.admit(server.client)
