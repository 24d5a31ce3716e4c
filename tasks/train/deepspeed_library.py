"""DeepSpeed as this trainer uses it: imported here alone, without what it imports or compiles for nothing."""

import sys

# Its autotuner, which is not used, imports MLflow where that is installed: seconds of every rank's start.
sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type] # None: not to be imported

import deepspeed  # noqa: E402 - after that line

# It would compile, for a minute, an all-reduce that only its inference kernels use.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

__all__ = ["deepspeed"]
