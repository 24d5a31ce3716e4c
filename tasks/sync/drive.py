"""The flow's side of a weight sync: tells trainer and server what to do at the same time, and compares them after."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tasks.errors import ParityError, RequestError, ServiceError, SyncError
from tasks.serve.client import VllmClient
from tasks.sync.config import SyncConfig
from tasks.sync.order import Sent, ServerPlace, Target, WeightAnswer, WeightOffer, WeightOrder
from tasks.sync.parity import largest_difference


class WeightSource(Protocol):
    """The trainer, as it gives weights away."""

    async def offer(self) -> WeightOffer:
        """What it has to give, and where."""

    async def send(self, targets: Sequence[Target]) -> list[Sent]:
        """Send the weights to servers that take them at the same time; a failing server does not hold the others."""


class Scorer(Protocol):
    """The trainer, as it is compared with."""

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """[B][T-1] raw log-probabilities of known tokens."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One server's sync.

    Attributes:
        bytes_sent: 0 when only the version's number was sent.
        transfer_s: seconds the weights were on their way.
        difference: largest difference in log-probability to the trainer, in nats; NaN when not compared.
    """

    server: str
    bytes_sent: int
    transfer_s: float
    difference: float


def new_prefix() -> str:
    """Under which a server and the trainer open links that they have not yet, or no longer."""
    return uuid.uuid4().hex


async def send_weights(
    source: WeightSource, server: VllmClient, version: str, config: SyncConfig, prefix: str
) -> WeightAnswer:
    """Replace a server's weights by the trainer's.

    Raises:
        SyncError: it failed; the links under `prefix` are not to be used again.
    """
    async with _named(server, f"taking version {version}", config.timeout_s):
        offer, place = await source.offer(), ServerPlace.from_json(await server.place())
        order = WeightOrder(
            version=version,
            mode=config.mode,
            transport="gloo",
            plan=offer.plan,
            timeout_s=config.timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            base=offer.base,
            host=offer.host,
            port=offer.port,
            prefix=prefix,
        )
        async with asyncio.TaskGroup() as both:
            sending = both.create_task(source.send([Target(server.url, "gloo", prefix, place.workers)]))
            taking = both.create_task(server.take_weights(order.to_json(), config.timeout_s))
    (sent,) = sending.result()
    if sent.error:
        raise SyncError(f"server {server.url}: {sent.error}")
    return WeightAnswer.from_json(taking.result())


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

    Raises:
        ParityError: it is above `threshold` nats, or not a number.
        SyncError: one of both did not answer within `timeout_s` seconds.
    """
    if not sequences:
        return float("nan")
    what = f"comparing log-probabilities at version {version}"
    async with _named(server, what, timeout_s), asyncio.TaskGroup() as every:
        expected = every.create_task(source.logprobs([sequence.tolist() for sequence in sequences]))
        found = [every.create_task(server.prompt_logprobs(each, timeout_s)) for each in sequences]
    difference = largest_difference(expected.result(), [each.result() for each in found])
    if not difference <= threshold:
        raise ParityError(server.url, version, difference, threshold)
    return difference


@asynccontextmanager
async def _named(server: VllmClient, what: str, timeout_s: float) -> AsyncIterator[None]:
    """Turn whatever fails inside, a deadline too, into a SyncError that says what was waited for."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise SyncError(
            f"server {server.url}: {what} took longer than sync.timeout_s = {timeout_s:g} s"
        ) from None
    except (RequestError, SyncError) as error:
        raise SyncError(f"server {server.url}: {what}: {error}") from error
    except ExceptionGroup as group:
        for death in group.exceptions:
            if isinstance(death, ServiceError):
                raise death from group
        raise SyncError(f"server {server.url}: {what}: {'; '.join(map(str, group.exceptions))}") from group
