"""Watches one vLLM server in the background: checks it when it seems to fail, and brings it back."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollmill.flows.policies.policy_servers import PolicyServers
from rollmill.flows.policies.services import HEALTH_INTERVAL_S, RETURN_TIMEOUT_S, ServerService, restart
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.errors import (
    ConfigError,
    ParityError,
    RequestError,
    ServiceError,
    ServiceStartError,
    SyncError,
)

# Gives a server that answers the current weights, and readmits it; see `WeightSync.rejoin`.
Rejoin = Callable[[ServerService], Awaitable[None]]

_MAY_COME_BACK = (SyncError, RequestError, ServiceStartError)


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Limits within which a failed server is brought back.

    Attributes:
        max_restarts: of a launched server in a row; see the setting `max_restarts`.
        rejoin_timeout_s: seconds within which an attached server must return with the current weights.
        retry_interval_s: seconds between two attempts to bring an attached server back.
    """

    max_restarts: int
    rejoin_timeout_s: float = RETURN_TIMEOUT_S
    retry_interval_s: float = HEALTH_INTERVAL_S


async def watch_server(
    servers: PolicyServers, server: ServerService, limits: WatchLimits, rejoin: Rejoin
) -> None:
    """Restore a server to the pool whenever it fails; returns when it cannot be restored.

    Training waits for the transfer of the weights only, not while the server starts or returns.

    Raises:
        ServiceDiedError: it cannot be brought back, and no other server is left.
    """
    await servers.are_up.wait()
    restarts = 0
    while server not in servers.lost:
        n_updates = servers.n_updates[server]
        reason = await _wait_for_failure(servers, server)
        if servers.n_updates[server] > n_updates:
            # It has served a step since it was brought back.
            restarts = 0
        if server.is_ours:
            restarts = await _restart_until_back(
                servers, server, limits.max_restarts, rejoin, reason, restarts
            )
        elif server not in servers.lost:
            await _await_return(servers, server, limits, rejoin, reason)


async def _wait_for_failure(servers: PolicyServers, server: ServerService) -> str:
    """Wait until a server has failed, and return the reason; after a false alarm the server returns to the pool."""
    alarm = servers.alarm(server)
    while server not in servers.failed:
        reason = await server.wait_for_failure(alarm)
        # Before the check: an alarm that comes during it must not be lost.
        alarm.clear()
        if await _is_answering(server):
            await servers.look_again(server)
        else:
            await servers.fail(server, reason or "it no longer answers /health")
    return servers.failed[server]


async def _is_answering(server: ServerService) -> bool:
    """Return True if a server's process runs and it answers /health."""
    is_running = server.process is None or server.process.is_running
    return is_running and await server.client.is_healthy()


async def _restart_until_back(
    servers: PolicyServers,
    server: ServerService,
    max_restarts: int,
    rejoin: Rejoin,
    reason: str,
    restarts: int,
) -> int:
    """Restart a launched server until it is back or was restarted too often; returns its restarts in a row."""
    # One that answers and serves its old weights is not restarted: it only needs the current ones.
    must_start = server in servers.mute or not await _is_answering(server)
    while True:
        restarts += must_start
        try:
            if must_start:
                await restart(server, reason, restarts - 1, max_restarts)
            must_start = True
            await rejoin(server)
        except _MAY_COME_BACK as error:
            reason = str(error)
            continue
        except ServiceError as error:
            # It was restarted too often, or its process cannot be ended.
            if error.service != server.name:
                raise
            servers.give_up(server, error.reason, error.log_tail)
        return restarts


async def _await_return(
    servers: PolicyServers, server: ServerService, limits: WatchLimits, rejoin: Rejoin, reason: str
) -> None:
    """Wait until an attached server answers and has the current weights; give it up after the time limit."""
    limit = f"{limits.rejoin_timeout_s:g} s"
    say(f"{server.name}: {reason.splitlines()[0]}; removed from the pool, waiting {limit} for its return")
    deadline = asyncio.get_running_loop().time() + limits.rejoin_timeout_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                await server.wait_for_return(must_sample=server in servers.mute)
            await rejoin(server)
        except TimeoutError:
            servers.give_up(server, f"{reason}; it did not return within {limit}")
        # It answers, and with other weights or another tokenizer: waiting longer would not change that.
        except (ParityError, ConfigError) as error:
            servers.give_up(server, str(error))
        except _MAY_COME_BACK as error:
            reason = str(error)
            await asyncio.sleep(limits.retry_interval_s)
            continue
        return
