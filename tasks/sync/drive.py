"""The flow's side of a weight sync: tells trainer and servers what to do at the same time, and compares them after."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np

from tasks.errors import ConfigError, ParityError, RequestError, RequestsHeldError, ServiceError, SyncError
from tasks.observe.clocks import keep, shifted
from tasks.observe.spans import Span, current_lane
from tasks.observe.waits import waited_for
from tasks.serve.client import VllmClient
from tasks.sync.choice import choose
from tasks.sync.config import SyncConfig
from tasks.sync.order import (
    FIRST_RANK,
    REQUESTS_HELD,
    WAITING_FOR_TRAINER,
    Place,
    Sent,
    ServerPlace,
    Target,
    WeightAnswer,
    WeightOffer,
    WeightOrder,
)
from tasks.sync.parity import largest_difference

VERIFY = "verify"
"""Mode of an order whose weights are compared with the live ones, which stay."""

FILES = "files"
"""The transport that the trainer has no part in once they are written."""


Report = Callable[[Mapping[str, int]], None]
"""Told how many bytes have gone to each server so far, by its address."""


class WeightSource(Protocol):
    """The trainer, as it gives weights away."""

    async def offer(self) -> WeightOffer:
        """What it has to give, and where."""

    async def send(self, targets: Sequence[Target], report: Report | None, every_s: float) -> list[Sent]:
        """Send the weights to servers that take them at the same time; a failing server does not hold the others.

        `report`, if there is one, is told every `every_s` seconds how far it is.
        """


class Scorer(Protocol):
    """The trainer, as it is compared with."""

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """[B][T-1] raw log-probabilities of known tokens."""


@dataclass(frozen=True, slots=True)
class Route:
    """How weights get to one server.

    Attributes:
        transport: see WeightOrder.
        workers: processes of the server that each take all weights.
        prefix: links are opened under it at the first transfer, and kept for later ones.
    """

    transport: str
    workers: int
    prefix: str


def new_prefix() -> str:
    """Under which a server and the trainer open links that they have not yet, or no longer."""
    return uuid.uuid4().hex


class Dispatch:
    """One version on its way to several servers: `send` once, and at the same time `take` for each of them.

    Args:
        source: the trainer.
        offer: what it has to give.
        routes: how each server is reached.
        version: name of the weights.
        config: settings.
        checksums: names of tensors whose checksums the servers are asked for.
        files: where the weights lie, for servers that take them by files; the trainer sends to the others alone.
        mode: of the order; that of the settings by default.
        report: told every sync.report_s how far the trainer is; None: nobody.

    Attributes:
        taken: the servers that have taken the weights.
        starts_ns: when each server that has taken them began to, in nanoseconds since 1970.
    """

    def __init__(
        self,
        source: WeightSource,
        offer: WeightOffer,
        routes: Mapping[VllmClient, Route],
        version: str,
        config: SyncConfig,
        checksums: Sequence[str] = (),
        files: Sequence[str] = (),
        *,
        mode: str = "",
        report: Report | None = None,
    ) -> None:
        self._source, self._offer, self._routes = source, offer, routes
        self._version, self._config, self._checksums = version, config, tuple(checksums)
        self._plan = msgspec.Raw(msgspec.json.encode(offer.plan))  # tens of kB, written once for all servers
        self._files, self._mode, self._report = tuple(files), mode or config.mode, report
        self.taken: set[VllmClient] = set()
        self.starts_ns: dict[str, int] = {}
        self._gone: asyncio.Future[dict[str, Sent]] = asyncio.Future()

    async def send(self) -> list[Sent]:
        """Have the trainer send to all servers; what became of each, in their order.

        Raises:
            ServiceError: the trainer is gone.
        """
        targets = [
            Target(server.url, route.transport, route.prefix, route.workers)
            for server, route in self._routes.items()
            if route.transport != FILES
        ]
        try:
            sent = await self._source.send(targets, self._report, self._config.report_s) if targets else []
        except (RequestError, SyncError) as error:
            sent = [Sent(each.server, 0, 0.0, f"trainer: {error}") for each in targets]
        self._gone.set_result({each.server: each for each in sent})
        return sent

    async def take(self, server: VllmClient) -> WeightAnswer:
        """Have a server take the weights; returns when they are in place and its requests go on.

        Raises:
            RequestsHeldError: it failed while they were being put in place, so its requests stay held.
            SyncError: it failed before that, and the old ones serve.
        """
        what = f"taking version {self._version} by {self._routes[server].transport}"
        async with named(server, what, "sync.timeout_s", self._config.timeout_s):
            order = self._order(self._routes[server]).to_json() | {"plan": self._plan}
            asked_ns = time.time_ns()
            taking = asyncio.ensure_future(server.take_weights(order, self._config.timeout_s))
            try:
                await asyncio.wait({taking, self._gone}, return_when=asyncio.FIRST_COMPLETED)
                if not taking.done() and (error := self._error(server)):
                    await asyncio.wait({taking}, timeout=self._config.stall_timeout_s)
                    if not taking.done():
                        raise SyncError(error)
                answer = WeightAnswer.from_json(await taking)
            finally:
                taking.cancel()
        self.taken.add(server)
        self.starts_ns[server.url] = _keep_spans(server, answer, asked_ns)
        return answer

    def _error(self, server: VllmClient) -> str:
        """Why the trainer has given a server up; empty when it has not."""
        sent = self._gone.result().get(server.url)
        return sent.error if sent else ""

    def _order(self, route: Route) -> WeightOrder:
        return WeightOrder(
            version=self._version,
            mode=self._mode,
            transport=route.transport,
            plan=self._offer.plan,
            timeout_s=self._config.timeout_s,
            stall_timeout_s=self._config.stall_timeout_s,
            base=self._offer.base,
            host=self._offer.host,
            port=self._offer.port,
            prefix=route.prefix,
            shared=self._offer.shared,
            files=self._files if route.transport == FILES else (),
            checksums=self._checksums,
        )


def _keep_spans(server: VllmClient, answer: WeightAnswer, asked_ns: int) -> int:
    """Keep what a server did to take weights, for the step that they are sent for; returns when it began, by our clock."""
    lane, until_ns = current_lane(), time.time_ns()
    step = lane.step if lane else -1
    told = shifted(
        [Span(*each)._replace(process=server.url, step=step) for each in answer.spans], asked_ns, until_ns
    )
    keep(told)
    return min((each.started_ns for each in told), default=asked_ns)


async def find_route(server: VllmClient, offer: WeightOffer, config: SyncConfig) -> tuple[Route, str]:
    """How weights are to get to a server, over links that are not open yet, and why in this way.

    Raises:
        ConfigError: the transport that is set is impossible there.
        SyncError: the server does not say where it runs.
    """
    async with named(server, "saying where it runs", "sync.timeout_s", config.timeout_s):
        place = ServerPlace.from_json(await server.place())
    try:
        choice = choose(
            config.transport, Place.from_json(offer.place), place, shares_memory=bool(offer.shared)
        )
    except ValueError as error:
        raise ConfigError("sync.transport", config.transport, f"server {server.url}: {error}") from error
    return Route(choice.transport, place.workers, new_prefix()), choice.reason


async def send_weights(
    source: WeightSource, server: VllmClient, version: str, config: SyncConfig, prefix: str
) -> WeightAnswer:
    """Replace one server's weights by the trainer's, over the links of a prefix.

    Raises:
        SyncError: it failed; the links under `prefix` are not to be used again.
    """
    offer = await source.offer()
    route, _ = await find_route(server, offer, config)
    dispatch = Dispatch(source, offer, {server: replace(route, prefix=prefix)}, version, config)
    what = f"taking version {version}"
    async with named(server, what, "sync.timeout_s", config.timeout_s), asyncio.TaskGroup() as both:
        sending = both.create_task(dispatch.send())
        taking = both.create_task(dispatch.take(server))
    (sent,) = sending.result()
    if sent.error:
        raise SyncError(f"server {server.url}: {sent.error}")
    return taking.result()


async def check_parity(
    source: Scorer,
    server: VllmClient,
    sequences: Sequence[np.ndarray],
    version: str,
    *,
    threshold: float,
    timeout_s: float,
) -> float:
    """Compare a server's log-probabilities of known tokens with the trainer's; returns the largest difference.

    What the trainer takes longer than the server is a wait for it.

    Raises:
        ParityError: it is above `threshold` nats, or not a number.
        SyncError: one of both did not answer within `timeout_s` seconds.
    """
    if not sequences:
        return float("nan")
    what = f"comparing log-probabilities at version {version}"
    async with named(server, what, "sync.timeout_s", timeout_s), asyncio.TaskGroup() as every:
        expected = every.create_task(source.logprobs([sequence.tolist() for sequence in sequences]))
        found = [every.create_task(server.prompt_logprobs(each, timeout_s)) for each in sequences]
        await asyncio.wait(found)
        await waited_for(WAITING_FOR_TRAINER, FIRST_RANK, expected)
    difference = largest_difference(expected.result(), [each.result() for each in found])
    if not difference <= threshold:
        raise ParityError(server.url, version, difference, threshold)
    return difference


@asynccontextmanager
async def named(server: VllmClient, what: str, setting: str, limit_s: float) -> AsyncIterator[None]:
    """Turn whatever fails inside, a deadline too, into a SyncError that says what was waited for."""
    where = f"server {server.url}: {what}"
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise SyncError(f"{where} took longer than {setting} = {limit_s:g} s") from None
    except (RequestError, SyncError) as error:
        kind = RequestsHeldError if REQUESTS_HELD in str(error) else SyncError
        raise kind(f"{where}: {error}") from error
    except ExceptionGroup as group:
        for told in group.exceptions:
            if isinstance(told, ServiceError | SyncError):
                raise told from group
        raise SyncError(f"{where}: {'; '.join(map(str, group.exceptions))}") from group
