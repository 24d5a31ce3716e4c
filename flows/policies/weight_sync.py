"""Weight sync: brings the trainer's weights to all servers at once, and verifies each server on its own.

    update ──> _join           the server answers, has our tokenizer, and a route to it is known
           ──> _broadcast      the trainer sends to all servers, in the background of:
                 _update_one   receive -> verify -> (send once more if they differ) -> admit to the pool
    rejoin ──> the same for one server that was restarted, by files, so that training continues meanwhile

The caller holds the trainer's weights still during `update`; `rejoin` holds them itself.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from rollmill.flows.failure import one_error
from rollmill.flows.policies.policy_servers import CACHES, PolicyServers
from rollmill.flows.policies.server_parity import Parity, ServedRun
from rollmill.flows.policies.server_tokenizer import check_tokenizer
from rollmill.flows.policies.services import ServerService
from rollmill.flows.policies.sync_report import RouteReport, SyncReport, SyncVerdict, progress_line
from rollmill.flows.policies.trainer_weights import OfferedWeights, WeightFiles
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.submission import Submission
from rollmill.tasks.errors import ChecksumError, ParityError, RequestError, RequestsHeldError, SyncError
from rollmill.tasks.observe.span_waits import wait_for_others
from rollmill.tasks.observe.spans import span, within
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.checkpoints.weight_snapshots import weights_location
from rollmill.tasks.sync.broadcast import FILES, VERIFY, Broadcast, find_route, name_snapshot
from rollmill.tasks.sync.weight_messages import (
    DEVICE_TRANSPORTS,
    FIRST_RANK,
    WAITING_FOR_TRAINER,
    SendResult,
    SendTarget,
    WeightUpdateResponse,
)
from rollmill.tasks.train.service.commands import DigestWeights
from rollmill.tasks.train.service.trainer_client import TrainerClient

# Holds the trainer's weights still; gives their version.
Hold = Callable[[], AbstractAsyncContextManager[PolicyVersion]]


class WeightSync(PolicyServers):
    """Brings the trainer's weights to all servers of a run; a server is in the pool only while its weights are verified.

    Args:
        run: the run that the servers sample for.
        trainer: its trainer.
        servers: all servers of the run.

    Attributes:
        parity: compares servers with the trainer.
        submitted: the times at which each server began to receive the last broadcast to all servers.
    """

    def __init__(self, run: ServedRun, trainer: TrainerClient, servers: Sequence[ServerService]) -> None:
        super().__init__(run, servers)
        self._trainer, self.parity = trainer, Parity(run, trainer)
        self._offered = OfferedWeights(trainer)
        # By server: incarnation of the trainer, and the route to it.
        self._routes: dict[VllmClient, tuple[int, SendTarget]] = {}
        self._route_report = RouteReport()
        # By server: transports that failed, which are not tried again.
        self._failed_transports: dict[VllmClient, set[str]] = defaultdict(set)
        config = run.config.sync
        location = weights_location(run.folder, run.id, config.folder)
        self._files = WeightFiles(trainer, location, config.timeout_s)
        self._calls, self.submitted = 0, Submission("servers")

    @property
    def calls(self) -> int:
        """Number of commands to the trainer and requests to servers so far, without those of comparisons."""
        return self._calls + self._offered.n_offers + self._files.n_written

    async def note_servers_before(self, version: PolicyVersion) -> None:
        """Have the servers score the tokens on which they are compared at `version`, while the trainer trains to it."""
        async with asyncio.TaskGroup() as group:
            for each in list(self._verified):
                group.create_task(self.parity.note_server_before(each.client, version))

    async def update(self, version: PolicyVersion, *, only_name: bool = False) -> list[SyncReport]:
        """Give every server the trainer's version, concurrently; returns a report for each server that has it now.

        A server that fails is left to its watcher, and one that failed before is not waited for.

        Args:
            version: the trainer's, whose weights are held still.
            only_name: True if the weights are those of the version before. Servers then get the name alone.
        """
        await self._for_each(self._asleep, lambda each: self._wake(each, "weights"))
        servers = [each for each in self.every if each not in self.failed and each not in self.lost]
        named = [each for each in servers if only_name and self._has_route(each.client, version)]
        others = [each for each in servers if each not in named]
        with one_error():
            async with asyncio.TaskGroup() as group:
                naming = {
                    each: group.create_task(self._survive(each, self._rename(each, version)))
                    for each in named
                }
                sending = group.create_task(self._update_all(others, version))
        self.are_up.set()
        renamed = [SyncReport(each.client.url) for each, name in naming.items() if name.result()]
        return [*renamed, *sending.result()]

    async def rejoin(self, server: ServerService, hold: Hold) -> None:
        """Return a server that failed and answers again to the pool, once it has the trainer's weights and they are verified.

        It loads the weights from files, unless it still has them. The trainer is held while it writes the files, not while the
        server loads them. If training has reached another version by then, the server loads that one with the trainer held. If it
        cannot read the files, the trainer sends the weights.

        Raises:
            SyncError, RequestError: the server failed again.
            ConfigError: it has another tokenizer or chat template than before.
            ServiceDiedError: the trainer is gone.
        """
        async with self._fail_on_error(server):
            async with hold() as version:
                await self._wake(server, "weights", CACHES)
                if await self._has_weights(server, str(version)):
                    self._take_back(server, version)
                    return
                self._had.pop(server, None)
                files = await self._write_for(server, version)
            # Without the trainer held: loading takes as long as the server needs, and training continues meanwhile.
            response = await self._try_load(server, version, files)
            async with hold() as current:
                if response is None:
                    await self._send_verified(server.client, current)
                else:
                    # Training has produced another version meanwhile; a second load without a hold might be late again.
                    if current != version:
                        files = await self._write_for(server, current)
                        response = await self._load(server.client, current, files)
                    await self._verify(server.client, current, response)
                self._take_back(server, current)

    async def clear(self) -> None:
        """Remove the files of weights that the trainer wrote for servers to load."""
        await self._files.clear()

    # Update of all servers

    async def _update_all(self, servers: Sequence[ServerService], version: PolicyVersion) -> list[SyncReport]:
        """Send the weights to all servers that can receive them, and add each to the pool as soon as it is verified."""
        async with asyncio.TaskGroup() as group:
            joins = {
                each: group.create_task(self._survive(each, self._join(each.client, version)))
                for each in servers
            }
        ready = [each for each, join in joins.items() if join.result()]
        self.submitted = Submission("servers")
        if not ready:
            return []
        for each in ready:
            self._verified.pop(each, None)
            self.run.pool.mark_unverified(each.client, str(version))
        # Before a server has the new weights: what they sample may not be taken for verified in any process.
        await self.run.pool.settle()
        async with (
            self._broadcast([each.client for each in ready], version, submitted=self.submitted) as broadcast,
            asyncio.TaskGroup() as group,
        ):
            updates = [
                group.create_task(self._survive(each, self._update_one(each, version, broadcast)))
                for each in ready
            ]
        return [report for each in updates if (report := each.result())]

    async def _update_one(
        self, server: ServerService, version: PolicyVersion, broadcast: Broadcast
    ) -> SyncReport:
        """Have a server receive the weights of a broadcast, verify them, and add the server to the pool.

        Weights that differ from the trainer's are sent once more.

        Raises:
            SyncError, RequestError: the server did not receive the weights, still differs, or reports another version.
        """
        client = server.client
        response = await self._receive(client, broadcast)
        await self._wake(server, CACHES)
        try:
            report = await self._verify(client, version, response)
        except (ChecksumError, ParityError) as error:
            say(f"{error}; sending the weights once more")
            # What it sampled with wrong weights must not become part of a trajectory.
            await self._reject(client, version)
            await self._join(client, version)
            report = await self._send_verified(client, version)
        # Before it is admitted: a server whose live model differs must not sample.
        every = self.run.config.sync.verify_every
        if every and version.version % every == 0:
            report = replace(report, verify_s=await self._verify_whole(client, version))
        self._admit(server, version)
        return report

    async def _rename(self, server: ServerService, version: PolicyVersion) -> bool:
        await self._wake(server, CACHES)
        return await self._set_name(server, version)

    async def _reject(self, server: VllmClient, version: PolicyVersion) -> None:
        """Remove a server with wrong weights from the pool and end its requests, which other servers then answer."""
        self.run.pool.remove(server)
        await self.run.pool.end_requests(server)
        self.run.pool.mark_unverified(server, str(version))
        await self.run.pool.settle()

    # Sending

    @asynccontextmanager
    async def _broadcast(
        self,
        servers: Sequence[VllmClient],
        version: PolicyVersion,
        verified_names: Sequence[str] = (),
        submitted: Submission | None = None,
    ) -> AsyncIterator[Broadcast]:
        """Send the weights to servers in the background of the block, which calls `update_server` for each server.

        The routes of servers that did not receive the weights are dropped, also if the block is cancelled.

        Args:
            servers: those to send to; `_join` has found their routes.
            version: the trainer's version.
            verified_names: names of all tensors, if servers are only to compare the weights with their live ones.
            submitted: notes when each server begins to receive.

        Raises:
            ServiceDiedError: the trainer is gone.
        """
        submitted = submitted or Submission("servers")
        self._route_report.log_new_routes()
        # Taken out until the transfer has succeeded: a link that broke must not be used again.
        routes: Mapping[VllmClient, SendTarget] = {server: self._routes.pop(server)[1] for server in servers}
        if len(servers) > 1:
            # Before the transfer, so that no server waits for the slowest one to be compared.
            await self._fetch_expected(version)
        snapshot = name_snapshot(str(version), self.run.config.sync)
        routes, files = await self._files.write_for(routes, version, snapshot)
        broadcast = await self._create_broadcast(routes, version, files, verified_names, snapshot=snapshot)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send(broadcast, version))
            group.create_task(self.parity.sequences(version))
            yield broadcast
        for url, started_ns in broadcast.starts_ns.items():
            submitted.note_start(url, started_ns)
        submitted.book()
        failed = {each.server for each in sending.result() if each.error}
        for server in broadcast.updated:
            if server.url not in failed:
                # The next transfer is of the changes of what the server holds now.
                route = replace(routes[server], base_snapshot=broadcast.snapshots[server.url])
                # A server that was sent the weights once more has a newer route by now.
                self._routes.setdefault(server, (version.incarnation, route))

    async def _create_broadcast(
        self,
        routes: Mapping[VllmClient, SendTarget],
        version: PolicyVersion,
        files: Sequence[str],
        verified_names: Sequence[str] = (),
        *,
        snapshot: str = "",
    ) -> Broadcast:
        self._calls += 1
        offer, config = await self._offered.offer(version), self.run.config.sync
        started = time.perf_counter()

        def report(sent: Mapping[str, int]) -> None:
            say(progress_line(version.version, sent, offer.plan.total_bytes, time.perf_counter() - started))

        return Broadcast(
            self._trainer,
            offer,
            routes,
            str(version),
            config,
            verified_names or await self._offered.names(version),
            files,
            snapshot=snapshot,
            mode=VERIFY if verified_names else "",
            report=report,
        )

    async def _send(self, broadcast: Broadcast, version: PolicyVersion) -> list[SendResult]:
        sent = await broadcast.send()
        # While servers put the weights in place; after the transfer, since a single server needs the trainer first.
        await self._fetch_expected(version)
        return sent

    async def _receive(self, server: VllmClient, broadcast: Broadcast) -> WeightUpdateResponse:
        self._calls += 1
        try:
            return await broadcast.update_server(server)
        except RequestsHeldError:
            if (transport := broadcast.transport(server)) in DEVICE_TRANSPORTS:
                # The links feed the live model, so one that fails looks like a failure of the switch.
                self._failed_transports[server].add(transport)
            raise
        except SyncError:
            # That of a server which died says nothing about its transport.
            if await server.is_healthy():
                self._failed_transports[server].add(broadcast.transport(server))
            raise

    async def _send_verified(self, server: VllmClient, version: PolicyVersion) -> SyncReport:
        """Send the weights to one server that `_join` has prepared, and verify them once.

        Raises:
            SyncError, RequestError: it did not receive the weights, differs, or reports another version.
            ServiceDiedError: the trainer is gone.
        """
        with one_error():
            async with self._broadcast([server], version) as broadcast:
                response = await self._receive(server, broadcast)
        return await self._verify(server, version, response)

    # Routes

    def _has_route(self, server: VllmClient, version: PolicyVersion) -> bool:
        return server in self._routes and self._routes[server][0] == version.incarnation

    async def _join(self, server: VllmClient, version: PolicyVersion) -> bool:
        """Check that a server answers and has our tokenizer, and find how weights are sent to it; returns True.

        Raises:
            SyncError, RequestError: it does not answer.
            ConfigError: it has another tokenizer or chat template, or the configured transport cannot reach it.
        """
        if self._has_route(server, version):
            return True
        if not await server.is_healthy():
            raise SyncError(f"server {server.url} does not answer /health")
        await check_tokenizer(self.run.openings, server)
        self._calls += 1
        offer, failed = await self._offered.offer(version), self._failed_transports[server]
        route, reason = await find_route(server, offer, self.run.config.sync, failed)
        self._routes[server] = version.incarnation, route
        self._route_report.note(server.url, route.transport, reason)
        return True

    # Files

    async def _write_for(self, server: ServerService, version: PolicyVersion) -> Sequence[str]:
        """Have the trainer write the files that a server is to load; returns their paths or addresses.

        The server is checked as by `_join` before, since it may have been replaced.
        """
        self._routes.pop(server.client, None)
        await self._join(server.client, version)
        return await self._files.write(version)

    async def _load(
        self, server: VllmClient, version: PolicyVersion, files: Sequence[str]
    ) -> WeightUpdateResponse:
        """Have a server load a version from files; raises SyncError if it does not."""
        route = SendTarget(server.url, FILES, prefix="")
        return await self._receive(server, await self._create_broadcast({server: route}, version, files))

    async def _try_load(
        self, server: ServerService, version: PolicyVersion, files: Sequence[str]
    ) -> WeightUpdateResponse | None:
        """Have a server load files; returns its response, or None if it could not and still serves its old weights."""
        try:
            return await self._load(server.client, version, files)
        except RequestsHeldError:
            raise
        except SyncError as error:
            say(f"{error}; sending the weights instead")
            return None

    # Verification

    async def _verify(
        self, server: VllmClient, version: PolicyVersion, response: WeightUpdateResponse
    ) -> SyncReport:
        """Compare live weights, checksums, log-probabilities and the version's name of a server with the trainer's.

        Raises:
            ChecksumError: weights differ.
            ParityError: log-probabilities look wrong, and the weights cannot be compared.
            ConfigError: it computes another function of the start model.
            SyncError, RequestError: it reports another version, or the comparison was not done in time.
        """
        if response.differing:
            raise ChecksumError(
                server.url, str(version), tuple(f"{each} (live)" for each in response.differing)
            )
        self._calls += 1
        is_exact = await self._is_exact(version)
        with within(process=server.url, lane="parity"), span("parity") as comparing, one_error():
            async with asyncio.TaskGroup() as group:
                checksums = group.create_task(self._offered.compare(server.url, version, response.checksums))
                parity = group.create_task(self.parity.compare(server, version, is_exact=is_exact))
                name = group.create_task(server.version())
                await asyncio.wait([parity, name])
                await wait_for_others(WAITING_FOR_TRAINER, FIRST_RANK, checksums)
        if (reported := name.result()) != str(version):
            raise SyncError(f"server {server.url} reports version {reported} after a sync of {version}")
        result = parity.result()
        if version.version == 0:
            self.parity.check_start(server, result)
        if result.alarm:
            await self._explain_alarm(server, version, result.alarm, response.uncompared)
        self.parity.accept(result)
        return SyncReport(
            server.url,
            response.bytes,
            response.received_s,
            response.held_s,
            comparing.duration_s,
            result.differences,
            whole_bytes=(await self._offered.offer(version)).plan.total_bytes,
            slope=result.movement.slope if result.movement else math.nan,
            alarmed=bool(result.alarm),
        )

    async def _explain_alarm(
        self, server: VllmClient, version: PolicyVersion, alarm: str, uncompared: Sequence[str]
    ) -> None:
        """Log a warning if a server whose log-probabilities look wrong has the trainer's weights.

        Log-probabilities alone never end a server where kernels round, since correct weights may look wrong.

        Raises:
            ChecksumError: its weights differ.
            ParityError: its weights cannot be compared, and where kernels are exact the alarm is certain.
        """
        where = f"server {server.url} at version {version.version}"
        if not uncompared:
            say(
                f"{where}: {alarm}. It keeps serving: every layer of its live model has the trainer's weights"
            )
            return
        try:
            await self._verify_whole(server, version)
        except ChecksumError:
            raise
        except (SyncError, RequestError) as error:
            if await self._is_exact(version):
                raise ParityError(server.url, str(version), alarm) from error
            say(
                f"{where}: {alarm}. It keeps serving: its weights cannot be compared with the trainer's ({error})"
            )
        else:
            say(f"{where}: {alarm}. It keeps serving: all its weights were compared and are the trainer's")

    async def _is_exact(self, version: PolicyVersion) -> bool:
        """Return True if trainer and servers compute in single precision, without a GPU, whose kernels multiply in fewer bits."""
        offer = await self._offered.offer(version)
        return self.run.config.serve.dtype == "float32" and offer.location.device == "cpu"

    async def _verify_whole(self, server: VllmClient, version: PolicyVersion) -> float:
        """Compare every tensor and the live model of a server with the trainer; returns the seconds that it took.

        Raises:
            ChecksumError: names all that differs.
            SyncError, RequestError: it could not be compared.
            ServiceDiedError: the trainer is gone.
        """
        started = time.perf_counter()
        digests = await self._trainer.do(DigestWeights())
        await self._join(server, version)
        with one_error():
            async with self._broadcast([server], version, tuple(digests)) as broadcast:
                response = await self._receive(server, broadcast)
        if differing := SyncVerdict.of(server.url, response, digests).differing:
            raise ChecksumError(server.url, str(version), differing)
        return time.perf_counter() - started

    async def _fetch_expected(self, version: PolicyVersion) -> None:
        """Fetch and keep the trainer's checksums and log-probabilities, with which servers are compared."""
        with one_error():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._offered.digests(version))
                group.create_task(self.parity.expect(version))
