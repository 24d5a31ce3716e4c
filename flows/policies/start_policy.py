"""The servers of a run that samples by its start model alone: named as version 0, and watched over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flows.policies.servers import Servers
from flows.policies.services import ServerService, open_servers
from flows.policies.start_weights import StartWeights
from flows.policies.watch import watch
from flows.running.run import Run
from flows.ui.progress import say
from tasks.serve.version import PolicyVersion


@asynccontextmanager
async def open_start_policy(run: Run) -> AsyncIterator[None]:
    """Start the vLLM servers of a run, or attach to them, and watch over them while it goes on.

    Raises:
        ServiceStartError: one did not answer in time.
        ConfigError: one has another tokenizer or chat template, or a trainer's weights.
    """
    version = PolicyVersion(run.id, 0, 0)
    say("bringing up the vLLM servers")
    async with open_servers(run.config, run.model, run.folder.logs) as services:
        weights = StartWeights(run)
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
