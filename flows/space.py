"""Room for the next step on the disk, by a run's settings."""

import asyncio
from pathlib import Path

from flows.config import RunConfig
from flows.run import TrainingRun
from tasks.store.space import Space

BYTES_OF_A_WEIGHT = {"float32": 4, "bfloat16": 2}
MOMENTS_BYTES = 8
"""AdamW's two of a weight, in single precision."""
MASTER_BYTES = 4
"""A weight in single precision, kept beside one in half."""


class StepSpace:
    """Looks, off the event loop, whether the disk will hold a step of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._config = run.config
        first = checkpoint_bytes(run.model, run.config.train.dtype)
        self._space = Space(run.folder, run.config.store.min_free_bytes, first)

    async def check(self, step: int, *, is_collected: bool = False) -> None:
        """Called before a step is collected, and before it is trained.

        Raises:
            DiskSpaceError: the disk will not hold it.
        """
        has_checkpoint = is_checkpoint_due(self._config, step + 1)
        await asyncio.to_thread(
            self._space.check, step, has_checkpoint=has_checkpoint, is_collected=is_collected
        )


def is_checkpoint_due(config: RunConfig, version: int) -> bool:
    """True for versions that are multiples of `train.checkpoint_every`, and for the last one."""
    return version % config.train.checkpoint_every == 0 or version == config.steps


def checkpoint_bytes(model: Path, dtype: str) -> int:
    """What a checkpoint of a model is expected to take, by the weight files of its folder, which are of its dtype.

    Example: 1 GB of weights in single precision make 3 GB, with AdamW's two moments; in half precision 7 GB.
    """
    weight_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    state_bytes = MOMENTS_BYTES + (MASTER_BYTES if dtype == "bfloat16" else 0)
    return weight_bytes * (BYTES_OF_A_WEIGHT[dtype] + state_bytes) // BYTES_OF_A_WEIGHT[dtype]
