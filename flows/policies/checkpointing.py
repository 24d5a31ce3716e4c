"""Checkpoints that are written beside the steps, and what waits for them: compaction, and the removal of old ones."""

import asyncio
from types import TracebackType
from typing import Self

from flows.config import RunConfig
from flows.policies.retention import drop_old_checkpoints
from flows.reporting.report import store_metrics
from flows.running.run import TrainingRun
from tasks.errors import RollmillError
from tasks.observe.metrics import Metric
from tasks.observe.spans import span, within
from tasks.store.checkpoint_files import read_marker
from tasks.store.filesystem import files_of, read_text
from tasks.store.layout import CHECKPOINT_MARKER, RunFolder, checkpoint_key
from tasks.train.client import TrainerClient
from tasks.train.protocol import CheckpointBegun


class Checkpointing:
    """Follows one checkpoint at a time to its end; an async context manager.

    Nothing relies on a checkpoint before it is complete: only then are the steps below it compacted, and older
    checkpoints removed.
    """

    def __init__(self, run: TrainingRun, client: TrainerClient) -> None:
        self._run, self._client = run, client
        self._tasks = asyncio.TaskGroup()
        self._following: asyncio.Task[RollmillError | None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    async def begun(self, version: int, begun: CheckpointBegun) -> None:
        """Follow a checkpoint that the trainer has begun, or found complete."""
        if begun.is_new:
            self._following = self._tasks.create_task(self._follow(version, begun.held_s))
        else:
            await self._use(version)

    async def ended(self) -> RollmillError | None:
        """Wait until none is being written; returns why the last one could not be, which is said once."""
        if (following := self._following) is None:
            return None
        error = await following
        self._following = None
        return error

    async def _follow(self, version: int, held_s: float) -> RollmillError | None:
        """What an error is depends on what became of the trainer, so it does not end what goes on beside it."""
        with within(lane="checkpoint"), span("checkpointing"):
            return await self._followed(version, held_s)

    async def _followed(self, version: int, held_s: float) -> RollmillError | None:
        try:
            written = await self._client.await_checkpoint(version)
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
            return error
        return None

    async def _use(self, version: int) -> None:
        self._run.compactor.begin(version)
        await drop_old_checkpoints(self._run)


def other_ranks(folder: RunFolder, version: int, config: RunConfig) -> str:
    """What people should know of a checkpoint that was written by other ranks, or under another stage; empty if not."""
    key = f"{checkpoint_key(version)}/{CHECKPOINT_MARKER}"
    marker = read_marker(read_text(files_of(folder), key), folder.path(key))
    ours, theirs = (config.train.ranks, config.train.zero_stage), (marker.ranks, marker.zero_stage)
    if ours == theirs:
        return ""
    return (
        f"version {version} was stored by {theirs[0]} ranks under ZeRO stage {theirs[1]}, and goes on with {ours[0]} under "
        f"{ours[1]}: it is taken over bit for bit, and what follows is the same within rounding"
    )
