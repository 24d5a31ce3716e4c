"""How long the bulk of a run is kept: routed experts, and checkpoints."""

import asyncio

from flows.running.run import Run, TrainingRun
from tasks.store.checkpoint_retention import remove_checkpoints
from tasks.store.resume import complete_checkpoints
from tasks.store.routing import expired_routing


async def drop_old_routing(run: Run, done: int) -> None:
    """Remove the routed experts of old steps when `store.keep_routing_steps` bounds them; `done` steps are trained.

    Raises:
        StoreError: a shard could not be removed.
    """
    if not (keep := run.config.store.keep_routing_steps):
        return
    checkpoint = max(await asyncio.to_thread(complete_checkpoints, run.folder), default=0)
    files, writer = run.store.files, run.store.writer
    gone = await asyncio.to_thread(expired_routing, files, done=done, checkpoint=checkpoint, keep=keep)
    if gone:
        writer.removed(gone)
        await writer.note()  # a shard that is gone without a note is damage
        await writer.remove(gone)


async def drop_old_checkpoints(run: TrainingRun) -> None:
    """Remove the checkpoints that `train.keep_checkpoints` and `keep_checkpoint_every` leave out; a newer one is complete.

    Raises:
        StoreError: one could not be removed.
    """
    train = run.config.train
    await asyncio.to_thread(
        remove_checkpoints,
        run.folder,
        run.store.files,
        keep=train.keep_checkpoints,
        keep_every=train.keep_checkpoint_every,
    )
