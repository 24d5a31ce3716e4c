"""The flow's side of a weight sync: tells trainer and server what to do at the same time, and compares them after."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tasks.errors import ParityError, RequestError, ServiceError, SyncError
from tasks.serve.client import VllmClient
from tasks.sync.config import SyncConfig
from tasks.sync.parity import largest_difference


class WeightSource(Protocol):
    """The trainer, as the sync sees it."""

    async def rendezvous(self) -> dict[str, Any]:
        """Where servers join: {"host", "port"}."""

    async def connect(self, server: str, prefix: str) -> None:
        """Wait until a server has joined under a prefix."""

    async def weight_plan(self) -> dict[str, Any]:
        """What a server must know before weights are sent."""

    async def send(self, servers: list[str]) -> dict[str, Any]:
        """Send the weights to servers that have joined; returns {"bytes", "buckets", "seconds"}."""

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


async def join(source: WeightSource, server: VllmClient, config: SyncConfig) -> None:
    """Open the link between trainer and server, in place of one they had.

    Raises:
        SyncError: they did not meet in time.
    """
    prefix = uuid.uuid4().hex
    async with _named(server, "joining the trainer", config.timeout_s):
        info = {**await source.rendezvous(), "prefix": prefix, "timeout_s": config.timeout_s}
        async with asyncio.TaskGroup() as both:
            both.create_task(source.connect(server.url, prefix))
            both.create_task(server.init_weight_transfer(info, config.timeout_s))


async def send_weights(
    source: WeightSource, server: VllmClient, version: str, config: SyncConfig
) -> dict[str, Any]:
    """Replace a server's weights by the trainer's; its requests are frozen meanwhile.

    Raises:
        SyncError: it failed half-way; the server must be started again.
    """
    async with _named(server, f"taking version {version}", config.timeout_s):
        plan = await source.weight_plan()
        await server.pause(config.timeout_s)
        await server.start_weight_update(config.timeout_s)
        async with asyncio.TaskGroup() as both:
            sending = both.create_task(source.send([server.url]))
            both.create_task(server.update_weights(plan, config.timeout_s))
        await server.finish_weight_update(version, config.timeout_s)
        await server.reset_prefix_cache(config.timeout_s)
        await server.resume(config.timeout_s)
    return sending.result()


async def check_parity(
    source: WeightSource,
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
