"""The trainer's weights to the servers of a run: sent to all at once, compared with the trainer's one by one."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flows.failure import one_error
from flows.policies.parity import Parity
from flows.policies.sync_report import RouteReport, SyncReport, progress_line
from flows.policies.sync_verdict import SyncVerdict
from flows.running.run import Run
from flows.running.submission import Submission
from flows.ui.progress import say
from tasks.errors import ChecksumError, ParityError, SyncError
from tasks.observe.spans import span, within
from tasks.observe.waits import waited_for
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.store.weights import addresses, remove_weights, weights_place
from tasks.sync.checksums import compare_checksums, names_in_turn
from tasks.sync.drive import FILES, VERIFY, Dispatch, Route, find_route
from tasks.sync.order import FIRST_RANK, WAITING_FOR_TRAINER, Sent, WeightAnswer, WeightOffer
from tasks.sync.task import send_weights
from tasks.train.client import TrainerClient

SendTask = Callable[[Dispatch, str], Coroutine[Any, Any, list[Sent]]]
"""Has the trainer send what is dispatched, under a version's name."""

Take = Callable[[VllmClient, Dispatch], Coroutine[Any, Any, object]]
"""Has a server take weights that are being sent."""


class WeightSync:
    """Sends weights to servers, whose routes it keeps, with the trainer's weights held still.

    Args:
        run: the run that the servers sample for.
        trainer: its trainer.
        parity: compares a server with it.
        task: has the trainer send.

    Attributes:
        calls: commands to the trainer and requests to servers so far, without those of comparisons.
        submitted: when the servers began that the last transfer went to.
    """

    def __init__(
        self, run: Run, trainer: TrainerClient, parity: Parity, task: SendTask = send_weights
    ) -> None:
        self._run, self._trainer, self._parity, self._task = run, trainer, parity, task
        self.calls, self._place = 0, ""
        self._offer: tuple[int, WeightOffer] | None = None
        self._routes: dict[VllmClient, tuple[int, Route]] = {}
        self.submitted, self._ways = Submission("servers"), RouteReport()
        self._asking, self._offering = asyncio.Lock(), asyncio.Lock()  # who waits books it to the trainer
        self._digests: tuple[str, Mapping[str, str]] = "", {}

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
        self._ways.note(server.url, route.transport, reason)

    async def prepare(self, version: PolicyVersion) -> None:
        """Read the tokens that servers will be compared on, while the step is trained that makes the version."""
        await self._parity.sequences(version)

    async def send(
        self,
        servers: Sequence[VllmClient],
        version: PolicyVersion,
        take: Take,
        whole: Sequence[str] = (),
    ) -> None:
        """Send to servers that have joined; `take` has each of them take the weights, and is awaited.

        With the names of all tensors (`whole`) servers compare them with those that they have, which stay.

        The routes of servers that do not take them are dropped, also when this is cancelled. The trainer says what
        servers are compared with while the server puts the weights in place; with several servers it says so before it
        sends, so that none waits for the slowest to be compared.

        Raises:
            ServiceDiedError: the trainer is gone.
        """
        self.submitted = submitted = Submission("servers")
        if not servers:
            return
        self._ways.tell()
        routes = {server: self._routes.pop(server)[1] for server in servers}
        if len(servers) > 1:
            await self._expect(version)
        is_written = any(route.transport == FILES for route in routes.values())
        files = await self.write(version) if is_written else ()
        dispatch = await self._dispatch(routes, version, files, whole)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._sent(dispatch, version))
            group.create_task(self._parity.sequences(version))
            for server in servers:
                group.create_task(take(server, dispatch))
        for url, started_ns in dispatch.starts_ns.items():
            submitted.started(url, started_ns)
        submitted.book()
        failed = {each.server for each in sending.result() if each.error}
        for server in dispatch.taken:
            if server.url not in failed:
                self._routes.setdefault(server, (version.incarnation, routes[server]))

    async def take(self, server: VllmClient, version: PolicyVersion, dispatch: Dispatch) -> SyncReport:
        """Have a server take weights that are being sent, and compare it; they are sent once more if it differs.

        Every sync.verify_every versions all its weights are compared besides, before it is let in.

        Raises:
            SyncError, RequestError: it did not take them, differs still, or reports another version.
        """
        answer = await self._taken(server, dispatch)
        try:
            report = await self.verify(server, version, answer)
        except (ChecksumError, ParityError) as error:
            say(f"{error}; sending it once more")
            await self._cut_off(server, version)
            await self.join(server, version)
            report = await self.send_verified(server, version)
        every = self._run.config.sync.verify_every
        if not every or version.version % every:
            return report
        return replace(report, verify_s=await self._verify_whole(server, version))

    async def send_verified(self, server: VllmClient, version: PolicyVersion) -> SyncReport:
        """Send to one server that has joined, and compare it once.

        Raises:
            SyncError, RequestError: it did not take the weights, differs, or reports another version.
            ServiceDiedError: the trainer is gone.
        """
        answers: list[WeightAnswer] = []

        async def take(server: VllmClient, dispatch: Dispatch) -> None:
            answers.append(await self._taken(server, dispatch))

        with one_error():
            await self.send([server], version, take)
        return await self.verify(server, version, *answers)

    async def write(self, version: PolicyVersion) -> Sequence[str]:
        """Have the trainer, which stands at that version, write its weights; returns where servers read the files."""
        run, config = self._run, self._run.config.sync
        self.calls += 1
        self._place = weights_place(run.folder, run.id, config.folder)
        files = await self._trainer.write_weights(self._place, version.version)
        return addresses(files, config.timeout_s)

    async def load(self, server: VllmClient, version: PolicyVersion, files: Sequence[str]) -> WeightAnswer:
        """Have a server take a version from files, while the trainer does something else.

        Raises:
            SyncError: it did not.
        """
        dispatch = await self._dispatch({server: Route(FILES, workers=1, prefix="")}, version, files)
        return await self._taken(server, dispatch)

    async def clear(self) -> None:
        """Remove the files of weights, if any were written."""
        if self._place:
            await asyncio.to_thread(remove_weights, self._place)

    async def verify(self, server: VllmClient, version: PolicyVersion, answer: WeightAnswer) -> SyncReport:
        """Compare a server that has taken a version with the trainer, which stands at it.

        Raises:
            ChecksumError, ParityError: it differs.
            SyncError, RequestError: it reports another version, or the comparison was not done in time.
        """
        self.calls += 1
        with within(process=server.url, lane="parity"), span("parity") as comparing, one_error():
            async with asyncio.TaskGroup() as group:
                checksums = group.create_task(self._compare_checksums(server, version, answer))
                difference = group.create_task(self._parity.compare(server, version))
                name = group.create_task(server.version())
                await asyncio.wait([difference, name])
                await waited_for(WAITING_FOR_TRAINER, FIRST_RANK, checksums)
        if (reported := name.result()) != str(version):
            raise SyncError(f"server {server.url} reports version {reported} after a sync of {version}")
        seconds = answer.received_s, answer.held_s, comparing.duration_s
        return SyncReport(server.url, answer.bytes, *seconds, difference.result())

    async def _compare_checksums(
        self, server: VllmClient, version: PolicyVersion, answer: WeightAnswer
    ) -> None:
        compare_checksums(server.url, str(version), await self._digests_of(version), answer.checksums)

    async def _cut_off(self, server: VllmClient, version: PolicyVersion) -> None:
        """End the requests that go on with wrong weights, to be sent again, and doubt what comes of the next transfer.

        Nothing new is asked of the server until it has right ones.
        """
        self._run.pool.set_aside(server)
        await server.close()
        self._run.pool.doubt(server, str(version))

    async def _verify_whole(self, server: VllmClient, version: PolicyVersion) -> float:
        """Compare every tensor, and the live model, with the trainer; returns the seconds that it took.

        Raises:
            ChecksumError: names all that differs.
            SyncError, RequestError: it could not be compared.
            ServiceDiedError: the trainer is gone.
        """
        started, answers = time.perf_counter(), list[WeightAnswer]()
        sent = await self._trainer.weight_digests(())

        async def take(server: VllmClient, dispatch: Dispatch) -> None:
            answers.append(await self._taken(server, dispatch))

        await self.join(server, version)
        with one_error():
            await self.send([server], version, take, tuple(sent))
        (answer,) = answers
        if differing := SyncVerdict.of(server.url, answer, sent).differing:
            raise ChecksumError(server.url, str(version), differing)
        return time.perf_counter() - started

    async def _sent(self, dispatch: Dispatch, version: PolicyVersion) -> list[Sent]:
        sent = await self._task(dispatch, str(version))
        await self._expect(version)
        return sent

    async def _taken(self, server: VllmClient, dispatch: Dispatch) -> WeightAnswer:
        self.calls += 1
        return await dispatch.take(server)

    async def _dispatch(
        self,
        routes: Mapping[VllmClient, Route],
        version: PolicyVersion,
        files: Sequence[str],
        whole: Sequence[str] = (),
    ) -> Dispatch:
        self._run.recording.started()
        self.calls += 1
        offer, config = await self._offered(version), self._run.config.sync
        names, mode = whole or self._names_in_turn(offer, version), VERIFY if whole else ""
        started = time.perf_counter()

        def report(sent: Mapping[str, int]) -> None:
            elapsed_s = time.perf_counter() - started
            say(progress_line(version.version, sent, offer.plan["total_bytes"], elapsed_s))

        return Dispatch(
            self._trainer, offer, routes, str(version), config, names, files, mode=mode, report=report
        )

    def _names_in_turn(self, offer: WeightOffer, version: PolicyVersion) -> Sequence[str]:
        names = [tensor["name"] for tensor in offer.plan["tensors"]]
        return names_in_turn(names, version.version, self._run.config.sync.checksums)

    async def _expect(self, version: PolicyVersion) -> None:
        """Have the trainer say what servers are compared with: the checksums of this version's tensors, and scores."""
        with one_error():
            async with asyncio.TaskGroup() as both:
                both.create_task(self._digests_of(version))
                both.create_task(self._parity.expect(version))

    async def _digests_of(self, version: PolicyVersion) -> Mapping[str, str]:
        async with self._asking:
            if self._digests[0] != str(version):
                names = self._names_in_turn(await self._offered(version), version)
                digests = await self._trainer.weight_digests(names) if names else {}
                self._digests = str(version), digests
            return self._digests[1]

    async def _offered(self, version: PolicyVersion) -> WeightOffer:
        """What the trainer has to give, which is asked once for each of its incarnations."""
        async with self._offering:
            if self._offer is None or self._offer[0] != version.incarnation:
                self.calls += 1
                self._offer = version.incarnation, await self._trainer.offer()
            return self._offer[1]
