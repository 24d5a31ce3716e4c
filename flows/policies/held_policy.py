"""The servers of a run that has no trainer: they hold the policy already, are named by its version, and watched over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flows.policies.held_weights import HeldWeights
from flows.policies.servers import Servers
from flows.policies.services import ServerService, open_servers
from flows.policies.watch import watch
from flows.running.run import Run
from flows.ui.progress import say
from tasks.serve.version import PolicyVersion


@asynccontextmanager
async def open_held_policy(run: Run, version: PolicyVersion) -> AsyncIterator[None]:
    """Start the vLLM servers of a run, or attach to them, and watch over them while it goes on.

    Args:
        run: whose servers they are.
        version: that they hold; those that are started here hold version 0.

    Raises:
        ServiceStartError: one did not answer in time.
        ConfigError: one has another tokenizer or chat template, or other weights.
    """
    say("bringing up the vLLM servers")
    async with open_servers(run.config, run.model, run.folder.logs) as services:
        weights = HeldWeights(run)
        servers = Servers(run, weights, services)

        @asynccontextmanager
        async def hold() -> AsyncIterator[PolicyVersion]:
            yield version

        async def rejoin(server: ServerService) -> None:
            await servers.rejoin(server, hold)

        async with asyncio.TaskGroup() as watching:
            for each in services:
                await weights.join(each.client, version)
            await servers.bring_up(version, only_name=True)
            config = run.config.serve
            watches = [watching.create_task(watch(servers, each, config, rejoin)) for each in services]
            yield
            for task in watches:
                task.cancel()
