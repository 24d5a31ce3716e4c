"""The servers of a run: which of them receive requests, those whose weights are verified, and which of them sleep."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from rollmill.flows.failure import one_error
from rollmill.flows.policies.server_parity import ServedRun
from rollmill.flows.policies.services import ServerService
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.errors import RequestError, RequestsHeldError, RollmillError, ServiceDiedError, SyncError
from rollmill.tasks.serve.policy_version import PolicyVersion

Result = TypeVar("Result")

# vLLM's tag of the memory for keys and values.
CACHES = "kv_cache"


class PolicyServers:
    """Keeps track of which servers of a run have verified weights; only these are in the pool and receive requests.

    A server that fails is removed from the pool and left to its watcher (`watch_server`), which brings it back or gives it up.

    Attributes:
        run: the run that they sample for.
        every: all servers of the run.
        failed: why each server failed that its watcher is bringing back.
        mute: those of `failed` that answer /health and cannot sample, so that only a restart helps.
        lost: servers that were given up.
        are_up: set once all servers were updated for the first time.
        n_updates: how often each server was admitted with verified weights.
    """

    def __init__(self, run: ServedRun, servers: Sequence[ServerService]) -> None:
        self.run = run
        self.every = tuple(servers)
        self.failed: dict[ServerService, str] = {}
        self.mute: set[ServerService] = set()
        self.lost: set[ServerService] = set()
        self.are_up = asyncio.Event()
        self.n_updates: Counter[ServerService] = Counter()
        self._verified: dict[ServerService, str] = {}
        # What failed servers had, and may still have.
        self._had: dict[ServerService, str] = {}
        # Servers that were put to sleep and have no memory for their caches yet.
        self._asleep: set[ServerService] = set()

    async def look_again(self, server: ServerService) -> None:
        """Return a removed server to the pool if it still has verified weights and can sample; otherwise mark it as failed.

        Does nothing to a server that is receiving new weights, or that its watcher is bringing back.
        """
        verified = self._verified.get(server)
        # It is being updated, or its watcher brings it back.
        if verified is None or server in self.failed:
            return
        has_weights = await self._has_weights(server, verified)
        can_sample = has_weights and await self._can_sample(server)
        # A sync may have begun during these requests.
        if self._verified.get(server) != verified:
            return
        if can_sample:
            self.run.pool.admit(server.client)
        elif has_weights:
            await self.fail(server, "it passes the health check but fails generation requests", is_mute=True)
        else:
            await self.fail(server, "it no longer has the policy's weights")

    async def fail(self, server: ServerService, reason: str, *, is_mute: bool = False) -> None:
        """Mark a server as failed: remove it from the pool, move its requests to others, and alarm its watcher.

        Args:
            server: the server.
            reason: how it failed.
            is_mute: True if it answers /health and cannot sample.
        """
        self.failed[server] = reason
        if is_mute:
            self.mute.add(server)
        if verified := self._verified.pop(server, None):
            self._had[server] = verified
        self.run.pool.remove(server.client)
        self.alarm(server).set()
        await self.run.pool.end_requests(server.client)

    def give_up(self, server: ServerService, reason: str, log_tail: str = "") -> None:
        """Remove a server from the run for good, and continue with the others.

        Raises:
            ServiceDiedError: it was the last one.
        """
        self.lost.add(server)
        self.run.pool.remove(server.client)
        n_left = len(self.every) - len(self.lost)
        if not n_left:
            raise ServiceDiedError(server.name, reason, log_tail)
        say(f"{server.name}: {reason.splitlines()[0]}; continuing with {n_left} of {len(self.every)} servers")

    def alarm(self, server: ServerService) -> asyncio.Event:
        """Return the event that asks a server's watcher to check the server."""
        return self.run.pool.alarm(server.client)

    async def sleep(self) -> None:
        """Have all servers free their GPUs' memory until the next `update`; none may be sampling."""

        async def put_to_sleep(server: ServerService) -> None:
            self._asleep.add(server)
            await server.client.sleep(self.run.config.sync.timeout_s)

        await self._for_each(self._verified, put_to_sleep)

    async def _has_weights(self, server: ServerService, name: str) -> bool:
        """Return True if a server is healthy and has the verified weights of that name."""
        try:
            is_healthy, verified = await server.client.is_healthy(), self._verified | self._had
            return is_healthy and verified.get(server) == name == await server.client.version()
        except RequestError:
            return False

    async def _can_sample(self, server: ServerService) -> bool:
        """Return True if a server can sample; a probe is sent only to one that failed many requests in a row."""
        if not self.run.pool.is_suspect(server.client):
            return True
        if not await server.client.can_sample():
            return False
        self.run.pool.note_success(server.client)
        return True

    async def _set_name(self, server: ServerService, version: PolicyVersion) -> bool:
        """Name the weights that a server has `version`, without sending any, and add it to the pool; returns True."""
        self._verified.pop(server, None)
        await server.client.set_version(str(version))
        self._admit(server, version)
        return True

    async def _survive(self, server: ServerService, attempt: Awaitable[Result]) -> Result | None:
        """Await an attempt to update a server and return its result; None, with the server marked as failed, if it failed."""
        try:
            return await attempt
        except (SyncError, RequestError) as error:
            await self.fail(server, str(error), is_mute=isinstance(error, RequestsHeldError))
            return None

    async def _for_each(
        self, servers: Iterable[ServerService], attempt: Callable[[ServerService], Awaitable[None]]
    ) -> None:
        """Call `attempt` with each server concurrently, and mark a server as failed if it raises."""
        with one_error():
            async with asyncio.TaskGroup() as group:
                for each in list(servers):
                    group.create_task(self._survive(each, attempt(each)))

    async def _wake(self, server: ServerService, *tags: str) -> None:
        """Wake the memory of a server, by vLLM's tags, if the server sleeps."""
        if server not in self._asleep:
            return
        for tag in tags:
            await server.client.wake(tag, self.run.config.sync.timeout_s)
        if CACHES in tags:
            self._asleep.discard(server)

    @asynccontextmanager
    async def _fail_on_error(self, server: ServerService) -> AsyncIterator[None]:
        """Mark a server as failed again if the block, which brings it back, raises a RollmillError, and pass the error on."""
        try:
            yield
        except RollmillError as error:
            await self.fail(server, str(error), is_mute=isinstance(error, RequestsHeldError))
            raise

    def _take_back(self, server: ServerService, version: PolicyVersion) -> None:
        self.failed.pop(server, None)
        self.mute.discard(server)
        self.run.pool.note_success(server.client)
        self._admit(server, version)
        say(f"{server.name} is back, at version {version.version}")

    def _admit(self, server: ServerService, version: PolicyVersion) -> None:
        # Its watcher found it dead while the sync was verifying it.
        if server in self.failed:
            raise SyncError(f"server {server.client.url} failed during a sync: {self.failed[server]}")
        self._verified[server] = str(version)
        self._had.pop(server, None)
        self.n_updates[server] += 1
        self.run.pool.admit(server.client)
