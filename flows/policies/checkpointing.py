"""Checkpoints written in the background, and what follows a complete one: compaction, and removal of old checkpoints and routed experts."""

import asyncio

from prefect import get_run_logger

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.run.live_run import Run, TrainingRun
from rollmill.flows.step.report import store_metrics
from rollmill.tasks.errors import LeaseLostError, RollmillError, StoreError
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.spans import span, within
from rollmill.tasks.store.checkpoints.checkpoint_marker import read_marker
from rollmill.tasks.store.checkpoints.checkpoint_retention import remove_checkpoints
from rollmill.tasks.store.expert_routing import list_expired_routing
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.resume import list_complete_checkpoints
from rollmill.tasks.train.service.answers import CheckpointBegun
from rollmill.tasks.train.service.commands import AwaitCheckpoint
from rollmill.tasks.train.service.trainer_client import TrainerClient


async def drop_old_routing(run: Run, done: int) -> None:
    """Remove the stored routed experts of steps that `store.keep_routing_steps` does not keep and no resume needs.

    Does nothing if that setting keeps all; `done` is the number of trained steps.

    Raises:
        StoreError: a shard could not be removed.
    """
    if not (keep := run.config.store.keep_routing_steps):
        return
    # A resumed run trains again on the steps after this checkpoint, and needs their routed experts.
    checkpoint = max(await asyncio.to_thread(list_complete_checkpoints, run.folder), default=0)
    files, writer = run.store.files, run.store.writer
    gone = await asyncio.to_thread(list_expired_routing, files, done=done, checkpoint=checkpoint, keep=keep)
    if gone:
        writer.record_removal(gone)
        # A shard that is missing without a record is damage.
        await writer.note()
        await writer.remove(gone)


class Checkpointing:
    """Waits in the background for a checkpoint to be written, then compacts older steps and removes older checkpoints.

    Nothing relies on a checkpoint before it is complete: only then are the steps below it compacted, and older
    checkpoints removed.

    Args:
        run: the run.
        client: client of its trainer.
        tasks: the group of the task that waits for the checkpoint.
    """

    def __init__(self, run: TrainingRun, client: TrainerClient, tasks: asyncio.TaskGroup) -> None:
        self._run, self._client, self._tasks = run, client, tasks
        self._following: asyncio.Task[RollmillError | None] | None = None

    async def track(self, version: int, begun: CheckpointBegun) -> None:
        """Wait in the background for a checkpoint that the trainer has begun; one that is already complete is used at once."""
        if begun.is_new:
            self._following = self._tasks.create_task(self._follow(version, begun.held_s))
        else:
            await self._use(version)

    async def wait_until_written(self) -> RollmillError | None:
        """Wait until no checkpoint is being written; returns the error of the last one once, otherwise None."""
        if (following := self._following) is None:
            return None
        error = await following
        self._following = None
        return error

    async def _follow(self, version: int, held_s: float) -> RollmillError | None:
        with within(lane="checkpoint"), span("checkpointing"):
            try:
                written = await self._client.do(AwaitCheckpoint(version=version))
                values = {
                    "train/checkpoint_held_s": held_s,
                    "train/checkpoint_written_s": written.written_s,
                    "train/checkpoint_bytes": float(written.n_bytes),
                }
                metrics = [Metric(name, "all", "value", value) for name, value in values.items()]
                await store_metrics(self._run, version - 1, metrics)
                await self._run.store.writer.note()
                await self._use(version)
            except RollmillError as error:
                # Returned, since raised it would end the whole run: a checkpoint lost with its trainer is written again.
                return error
            return None

    async def _use(self, version: int) -> None:
        run, kept = self._run, self._run.config.checkpoint
        run.compactor.begin(version)
        try:
            await asyncio.to_thread(
                remove_checkpoints, run.folder, run.store.files, keep=kept.keep, keep_every=kept.keep_every
            )
        except LeaseLostError:
            raise
        except StoreError as error:
            get_run_logger().warning(
                "an old checkpoint could not be removed, which the next checkpoint tries again: %s", error
            )


def other_ranks(folder: RunFolder, version: int, config: RunConfig) -> str:
    """Return a log line if a checkpoint was stored by another number of ranks or ZeRO stage than configured; otherwise ""."""
    marker = read_marker(folder, version)
    ours, theirs = (config.train.ranks, config.train.zero_stage), (marker.ranks, marker.zero_stage)
    if ours == theirs:
        return ""
    return (
        f"version {version} was stored by {theirs[0]} ranks under ZeRO stage {theirs[1]}, and continues with {ours[0]} under "
        f"{ours[1]}: its state is loaded exactly; later steps are the same within rounding"
    )
