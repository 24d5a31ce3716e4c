"""A sync of one server, without a run."""

import asyncio
from dataclasses import replace

from rollmill.tasks.errors import SyncError
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import Broadcast, WeightSource, find_route, name_errors
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_messages import WeightUpdateResponse


async def send_to_server(
    source: WeightSource, server: VllmClient, version: str, config: SyncConfig, prefix: str
) -> WeightUpdateResponse:
    """Replace one server's weights by the trainer's, over the links of a prefix.

    Raises:
        SyncError: it failed; the links under `prefix` are not to be used again.
    """
    offer = await source.offer()
    route, _ = await find_route(server, offer, config)
    broadcast = Broadcast(source, offer, {server: replace(route, prefix=prefix)}, version, config)
    what = f"receiving version {version}"
    async with name_errors(server, what, config.timeout_s), asyncio.TaskGroup() as both:
        sending = both.create_task(broadcast.send())
        updating = both.create_task(broadcast.update_server(server))
    (sent,) = sending.result()
    if sent.error:
        raise SyncError(f"server {server.url}: {sent.error}")
    return updating.result()
