"""The room that a step needs on the disk, and when checkpoints are due."""

import asyncio
from pathlib import Path

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.run.live_run import TrainingRun
from rollmill.tasks.store.free_space import DiskSpaceGuard
from rollmill.tasks.train.config import TrainConfig

BYTES_OF_A_WEIGHT = {"float32": 4, "bfloat16": 2}

# Bytes that stay free on the disk of the run's folder: logs and other programs must not fail before the run stops.
MIN_FREE_BYTES = 256 << 20
# A weight and AdamW's two moments of it, in single precision.
STATE_BYTES = 12

# Of the checkpoints that are due so many of the newest: the one being written, and the next.
_NEWEST_CHECKPOINTS = 2


class StepSpace:
    """Checks in a thread whether the disk has room for a step of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._config = run.config
        self._trains = run.store.manifest.trains
        first = checkpoint_bytes(run.model, run.config.train)
        # Steps are collected ahead of training.
        n_open = max(1, run.config.rollout.max_staleness)
        self._space = DiskSpaceGuard(run.folder, MIN_FREE_BYTES, first, n_open=n_open)

    async def check(self, step: int, *, is_collected: bool = False) -> None:
        """Raise DiskSpaceError if the disk lacks room for a step; call it before collecting and before training the step.

        Raises:
            DiskSpaceError: the disk will not hold it.
        """
        due = due_checkpoints(self._config, step + 1)[-_NEWEST_CHECKPOINTS:] if self._trains else []
        await asyncio.to_thread(self._space.check, step, due=due, is_collected=is_collected)


def is_checkpoint_due(config: RunConfig, version: int) -> bool:
    """Return True for versions that are multiples of `checkpoint.every`, and for the last one."""
    return version % config.checkpoint.every == 0 or version == config.steps


def due_checkpoints(config: RunConfig, last: int) -> list[int]:
    """Return the versions from 1 to `last` that get a checkpoint, ascending."""
    return [version for version in range(1, last + 1) if is_checkpoint_due(config, version)]


def checkpoint_bytes(model: Path, train: TrainConfig) -> int:
    """Estimate the bytes of a model's checkpoint from its weight files, assuming that they have `train.dtype`.

    Adapters alone are small; the first checkpoint of them is expected to take nothing.

    Example: 1 GB of weights in single precision make 3 GB, with AdamW's two moments; in half precision 6 GB.
    """
    if train.lora.rank:
        return 0
    weight_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return weight_bytes * STATE_BYTES // BYTES_OF_A_WEIGHT[train.dtype]
