"""Watches over one vLLM server beside the steps: looks when it seems to fail, and brings it back when it has."""

import asyncio
from collections.abc import Awaitable, Callable

from flows.policies.servers import Servers
from flows.policies.services import ServerService, restart
from flows.ui.progress import say
from tasks.errors import (
    ConfigError,
    ParityError,
    RequestError,
    ServiceDiedError,
    ServiceStartError,
    SyncError,
)
from tasks.serve.config import ServeConfig

Rejoin = Callable[[ServerService], Awaitable[None]]
"""Brings a server that answers to the current weights, once the trainer's are still; see Servers.rejoin."""

_MAY_COME_BACK = (SyncError, RequestError, ServiceStartError)


async def watch(servers: Servers, server: ServerService, config: ServeConfig, rejoin: Rejoin) -> None:
    """For ever, or until the server is given up: wait until it fails, and bring it back.

    The trainer is held up for the transfer of the weights alone, not while the server starts or is awaited.

    Raises:
        ServiceDiedError: it cannot be brought back, and no other server is left.
    """
    await servers.are_up.wait()
    restarts = 0
    while server not in servers.lost:
        reason = await _failure(servers, server)
        if server.is_ours:
            restarts = await _start_again(servers, server, config, rejoin, reason, restarts)
        elif server not in servers.lost:
            await _await_return(servers, server, config, rejoin, reason)


async def _failure(servers: Servers, server: ServerService) -> str:
    """Wait until a server has failed; returns how. One that answers after all, with its weights, is let in again."""
    alarm = servers.alarm(server)
    while server not in servers.failed:
        reason = await server.failed(alarm)
        alarm.clear()
        if await _answers(server):
            await servers.look_again(server)
        else:
            await servers.fail(server, reason or "it no longer answers /health")
    return servers.failed[server]


async def _answers(server: ServerService) -> bool:
    """True for a server that runs and answers."""
    is_running = server.process is None or server.process.is_running
    return is_running and await server.client.is_healthy()


async def _start_again(
    servers: Servers, server: ServerService, config: ServeConfig, rejoin: Rejoin, reason: str, restarts: int
) -> int:
    """Start a launched server again until it is back or was started too often; returns how often by now.

    One that answers, and whose old weights serve, is given the current ones first as it is.
    """
    must_start = server in servers.mute or not await _answers(server)
    while True:
        restarts += must_start
        try:
            if must_start:
                await restart(server, reason, restarts - 1, config.max_restarts)
            must_start = True
            await rejoin(server)
        except ServiceDiedError as error:
            if error.service != server.name:
                raise
            servers.give_up(server, error.reason, error.log_tail)
        except _MAY_COME_BACK as error:
            reason = str(error)
            continue
        return restarts


async def _await_return(
    servers: Servers, server: ServerService, config: ServeConfig, rejoin: Rejoin, reason: str
) -> None:
    """Wait until an attached server answers and has taken the current weights, or its time is over."""
    limit = f"serve.rejoin_timeout_s = {config.rejoin_timeout_s:g} s"
    say(f"{server.name}: {reason.splitlines()[0]}; set aside, awaited for {limit}")
    deadline = asyncio.get_running_loop().time() + config.rejoin_timeout_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                await server.answers(must_sample=server in servers.mute)
            await rejoin(server)
        except TimeoutError:
            servers.give_up(server, f"{reason}; it was not back within {limit}")
        except (ParityError, ConfigError) as error:
            servers.give_up(server, str(error))
        except _MAY_COME_BACK as error:
            reason = str(error)
            await asyncio.sleep(config.health_interval_s)
            continue
        return
