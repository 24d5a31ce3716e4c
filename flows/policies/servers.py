"""The vLLM servers of a run: kept at the policy's current version, verified, set aside when they fail."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from flows.failure import one_error
from flows.policies.held_weights import HeldWeights
from flows.policies.parity import Parity
from flows.policies.services import ServerService
from flows.policies.sync_report import SyncReport
from flows.policies.weight_sync import WeightSync
from flows.running.run import Run
from flows.running.submission import Submission
from flows.ui.progress import say
from tasks.errors import RequestError, RequestsHeldError, RollmillError, ServiceDiedError, SyncError
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.sync.drive import Dispatch
from tasks.sync.order import WeightAnswer
from tasks.train.client import TrainerClient

Result = TypeVar("Result")

Hold = Callable[[], AbstractAsyncContextManager[PolicyVersion]]
"""Holds the trainer's weights still; gives the version that it stands at."""


def servers_of(run: Run, trainer: TrainerClient, servers: Sequence[ServerService]) -> "Servers":
    """The servers of a run, to be brought to the trainer's versions; reads what the run has measured at version 0."""
    return Servers(run, WeightSync(run, trainer, Parity(run, trainer)), servers)


class Servers:
    """Brings servers to the trainer's version; a server is in the pool only while it is there.

    `bring_up` is called with the trainer's weights held still.

    Args:
        run: the run that they sample for.
        sync: brings weights to them.
        servers: all of them.

    Attributes:
        run: the run that they sample for.
        every: all servers of the run.
        failed: those that are being brought back, by their watchers; how they failed.
        mute: those of them that answer and cannot sample.
        lost: those that were given up.
        are_up: set when all have been brought up for the first time.
    """

    def __init__(self, run: Run, sync: WeightSync | HeldWeights, servers: Sequence[ServerService]) -> None:
        self.run, self._sync = run, sync
        self.every = tuple(servers)
        self.failed: dict[ServerService, str] = {}
        self.mute: set[ServerService] = set()
        self.lost: set[ServerService] = set()
        self.are_up = asyncio.Event()
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

    async def prepare(self, version: PolicyVersion) -> None:
        """Read ahead what bringing the servers to a version needs that is stored, once the version's batch is."""
        await self._sync.prepare(version)

    async def rejoin(self, server: ServerService, hold: Hold) -> None:
        """Let a server in that failed and answers again; it takes the policy's weights by files unless it still has them.

        The trainer is held while it writes them, and free while the server loads them. When the version has moved on
        meanwhile, the server loads once more, with the trainer's weights held still; when it cannot read the files, they
        are sent to it.

        Raises:
            SyncError, RequestError: it failed again.
            ConfigError: it has another tokenizer or chat template than before.
            ServiceDiedError: the trainer is gone.
        """
        try:
            async with hold() as version:
                if await self._has(server, str(version)):
                    self._take_back(server, version)
                    return
                files = await self._written(server, version)
            answer = await self._load(server, version, files)
            async with hold() as current:
                if answer is None:
                    await self._sync.send_verified(server.client, current)
                else:
                    if current != version:
                        files = await self._written(server, current)
                        answer = await self._sync.load(server.client, current, files)
                    await self._sync.verify(server.client, current, answer)
                self._take_back(server, current)
        except RollmillError as error:
            await self.fail(server, str(error), is_mute=isinstance(error, RequestsHeldError))
            raise

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
            await self.fail(server, "it answers /health and fails generations", is_mute=True)
        else:
            await self.fail(server, "it no longer has the policy's weights")

    @property
    def calls(self) -> int:
        """Commands to the trainer and requests to servers that all syncs took so far, without their comparisons."""
        return self._sync.calls

    @property
    def submitted(self) -> Submission:
        """When the servers began that weights went to last."""
        return self._sync.submitted

    async def clear(self) -> None:
        """Remove what of the weights lies in files; no server needs it any more."""
        await self._sync.clear()

    async def fail(self, server: ServerService, reason: str, *, is_mute: bool = False) -> None:
        """Ask a server no more, cut its requests off, which go to others, and leave it to its watcher.

        Args:
            server: the server.
            reason: how it failed.
            is_mute: True for one that answers and cannot sample.
        """
        self.failed[server] = reason
        if is_mute:
            self.mute.add(server)
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
            self.run.pool.doubt(server.client, str(version))
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
            await self.fail(server, str(error), is_mute=isinstance(error, RequestsHeldError))
            return None

    async def _written(self, server: ServerService, version: PolicyVersion) -> Sequence[str]:
        """The files of a version that a server, which may be a new one at its address, is to take."""
        self._sync.forget(server.client)
        await self._sync.join(server.client, version)
        return await self._sync.write(version)

    async def _load(
        self, server: ServerService, version: PolicyVersion, files: Sequence[str]
    ) -> WeightAnswer | None:
        """What a server says that has loaded files; None when it could not, and its old weights serve."""
        try:
            return await self._sync.load(server.client, version, files)
        except RequestsHeldError:
            raise
        except SyncError as error:
            say(f"{error}; the weights are sent to it")
            return None

    def _take_back(self, server: ServerService, version: PolicyVersion) -> None:
        self.failed.pop(server, None)
        self.mute.discard(server)
        self.run.pool.answered(server.client)
        self._let_in(server, version)
        say(f"{server.name} is back, at version {version.version}")

    def _let_in(self, server: ServerService, version: PolicyVersion) -> None:
        if server in self.failed:
            raise SyncError(f"server {server.client.url} failed during a sync: {self.failed[server]}")
        self._verified[server] = str(version)
        self.run.pool.admit(server.client)
