"""Room for the next step on the disk, by a run's settings."""

import asyncio
from pathlib import Path

from flows.config import RunConfig
from flows.running.run import TrainingRun
from tasks.store.space import Space
from tasks.train.config import TrainConfig

BYTES_OF_A_WEIGHT = {"float32": 4, "bfloat16": 2}
STATE_BYTES = 12
"""A weight and AdamW's two moments of it, in single precision."""
_LOOKED_AT = 2
"""Of the checkpoints that are due so many of the newest: the one being written, and the next."""


class StepSpace:
    """Looks, off the event loop, whether the disk will hold a step of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._config = run.config
        self._trains = run.store.manifest.trains
        first = checkpoint_bytes(run.model, run.config.train)
        self._space = Space(run.folder, run.config.store.min_free_bytes, first)

    async def check(self, step: int, *, is_collected: bool = False) -> None:
        """Called before a step is collected, and before it is trained.

        Raises:
            DiskSpaceError: the disk will not hold it.
        """
        due = due_checkpoints(self._config, step + 1)[-_LOOKED_AT:] if self._trains else []
        await asyncio.to_thread(self._space.check, step, due=due, is_collected=is_collected)


def is_checkpoint_due(config: RunConfig, version: int) -> bool:
    """True for versions that are multiples of `train.checkpoint_every`, and for the last one."""
    return version % config.train.checkpoint_every == 0 or version == config.steps


def due_checkpoints(config: RunConfig, last: int) -> list[int]:
    """Versions from 1 to `last` after which a checkpoint is due, ascending."""
    return [version for version in range(1, last + 1) if is_checkpoint_due(config, version)]


def checkpoint_bytes(model: Path, train: TrainConfig) -> int:
    """What a checkpoint of a model is expected to take, by the weight files of its folder, which are of its dtype.

    Adapters alone are small; the first checkpoint of them is expected to take nothing.

    Example: 1 GB of weights in single precision make 3 GB, with AdamW's two moments; in half precision 6 GB.
    """
    if train.lora.rank:
        return 0
    weight_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return weight_bytes * STATE_BYTES // BYTES_OF_A_WEIGHT[train.dtype]
