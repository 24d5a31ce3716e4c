"""Every use of DeepSpeed's private API; DeepSpeed is imported here alone. Seen in DeepSpeed 0.19.8.

| private | used for | public alternative |
|---|---|---|
| `ops.__compatible_ops__` | kernels that DeepSpeed would compile | none |
| `ds_shape`, `ds_numel`, `ds_tensor`, `partition_numel` | a parameter's shard under ZeRO-3 | none without a gather |
| `_hp_mapping` | a parameter's range of a rank's cut under ZeRO 1 and 2 | `deepspeed.utils.safe_get_full_*`, below |
| `fp32_partitioned_groups_flat`, `fp16_groups` | single-precision weights under ZeRO-3 | `safe_get_local_*`, one copy each |
| `clip_grad` | another limit of the gradient's norm between two steps | a new engine |
| `checkpoint_event_prologue`, `..._epilogue`, `update_lp_params` | weights set from outside reach the model | none |
| `FWD_MODULE_STACK`, `__params_to_release` | references to a closed model under ZeRO-3 | none: `destroy` keeps them |

`safe_get_full_*` adds up what the ranks hold, which makes +0 of -0 and gathers each parameter on every rank: checkpoints
would neither be byte-exact nor written in parallel.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from rollmill.tasks.errors import LibraryError

# Its autotuner, which is not used, imports MLflow where that is installed: seconds of every rank's start.
sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type] # None: not to be imported

import deepspeed  # noqa: E402 - after that line
from deepspeed.runtime.zero import parameter_offload  # noqa: E402
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator  # noqa: E402

if sys.modules["mlflow"] is None:
    # Whoever imports it later in this process gets it.
    del sys.modules["mlflow"]

__all__ = ["deepspeed"]

SEEN_IN = "0.19.8"

# Without this entry DeepSpeed compiles, for a minute, an all-reduce that only its inference kernels use.
if isinstance(ops := getattr(deepspeed.ops, "__compatible_ops__", None), dict):
    ops["deepspeed_shm_comm"] = False


class Fragment(NamedTuple):
    """Range of a flattened parameter that this rank's optimizer holds under ZeRO 1 and 2.

    Attributes:
        start: index of the range's first number in the flattened parameter.
        size: how many numbers the range has.
        group: index of the optimizer's parameter group with these numbers.
        offset: index of the range's first number in the group's flat tensor.
    """

    start: int
    size: int
    group: int
    offset: int


def _private(owner: Any, name: str) -> Any:
    """Return a private attribute of a DeepSpeed object; LibraryError if this version of DeepSpeed lacks it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        version = deepspeed.__version__
        raise LibraryError("deepspeed", version, SEEN_IN, f"{type(owner).__name__}.{name}") from None


def is_sharded(parameter: torch.nn.Parameter) -> bool:
    """Return True for a parameter that ZeRO-3 has partitioned."""
    return hasattr(parameter, "ds_tensor")


def whole_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Shape of a parameter, whether or not ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def local_tensor(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of a partitioned parameter, [n] with padding; any other parameter itself."""
    held: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return held


def shard_range(parameter: torch.nn.Parameter, rank: int) -> tuple[int, int]:
    """Return which elements of a ZeRO-3 parameter, flattened, are on a rank: (first index, index after the last), without padding.

    Both are equal if the rank has none.
    """
    size, numel = int(_private(parameter, "partition_numel")()), int(_private(parameter, "ds_numel"))
    start = min(rank * size, numel)
    return start, min(start + size, numel)


def is_zero_3(wrapper: Any) -> bool:
    """Return True if DeepSpeed's optimizer is that of ZeRO-3."""
    return hasattr(wrapper, "fp32_partitioned_groups_flat")


def is_zero_1_or_2(parameters: list[torch.nn.Parameter]) -> bool:
    """Return True if ZeRO 1 or 2 has divided the parameters among the ranks."""
    return any(hasattr(each, "_hp_mapping") for each in parameters)


def find_fragment(parameter: torch.nn.Parameter) -> Fragment | None:
    """Return the range of a parameter that this rank holds under ZeRO 1 and 2; None if it holds none of it."""
    held = _private(parameter, "_hp_mapping")
    if held is None:
        return None
    return Fragment(
        start=held.lp_fragment_address.start,
        size=held.lp_fragment_address.numel,
        group=held.param_group_index,
        offset=held.hp_fragment_address.start,
    )


def find_shards(wrapper: Any) -> dict[int, tuple[torch.Tensor, int]]:
    """Under ZeRO-3: (flat single-precision tensor, offset in it) of each parameter's shard, by the parameter's id()."""
    places: dict[int, tuple[torch.Tensor, int]] = {}
    groups = _private(wrapper, "fp32_partitioned_groups_flat"), _private(wrapper, "fp16_groups")
    for flat, parameters in zip(*groups, strict=True):
        offset = 0
        # Shards are stored one after another, each padded to the same size on every rank.
        for parameter in parameters:
            places[id(parameter)] = flat, offset
            offset += int(_private(parameter, "partition_numel")())
    return places


@contextmanager
def set_shards(wrapper: Any) -> Iterator[None]:
    """Allow writing this rank's ZeRO-3 shards in the `with` block, and publish them to the model after it; a collective."""
    _private(wrapper, "checkpoint_event_prologue")()
    yield
    _private(wrapper, "checkpoint_event_epilogue")()


def publish_cuts(wrapper: Any) -> None:
    """Under ZeRO 1 and 2: copy the single-precision weights into the model on all ranks. A collective."""
    update: Callable[[], None] = _private(wrapper, "update_lp_params")
    update()


def set_max_norm(wrapper: Any, max_norm: float) -> None:
    """Set the global norm to which ZeRO's optimizer scales gradients down; 0: no limit."""
    _private(wrapper, "clip_grad")
    wrapper.clip_grad = max_norm


def forget_model(model: torch.nn.Module) -> None:
    """Drop the references to a model that DeepSpeed keeps after its engine under ZeRO-3 is destroyed, so that it can be freed."""
    closed = set(model.modules())
    # What a newer version has not, keeps no reference.
    stack = getattr(parameter_offload, "FWD_MODULE_STACK", [])
    stack[:] = [each for each in stack if each not in closed]
    # The function below its wrapper caches its results by module, for all models: others are computed again.
    cached = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(cached, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
