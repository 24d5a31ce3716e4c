"""How long the bulk of a run is kept."""

import asyncio

from flows.run import Run
from tasks.store.resume import complete_checkpoints
from tasks.store.routing import remove_routing


async def drop_old_routing(run: Run, done: int) -> None:
    """Remove the routed experts of old steps when `store.keep_routing_steps` bounds them; `done` steps are trained.

    Raises:
        StoreError: a shard could not be removed.
    """
    if keep := run.config.store.keep_routing_steps:
        checkpoint = max(await asyncio.to_thread(complete_checkpoints, run.folder), default=0)
        gone = await asyncio.to_thread(
            remove_routing, run.store.files, done=done, checkpoint=checkpoint, keep=keep
        )
        run.store.writer.removed(gone)
