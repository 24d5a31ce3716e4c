"""Low-rank adapters that are sent without the start model, which each server reads from its own folder.

The new weight is W + (alpha / rank) B A, with W of the start model and A, B of the adapter (Hu et al. 2021,
arXiv:2106.09685, eq. 3). Trainer and server compute it with the same function.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.weight_messages import AdapterBase

A, B = ".lora_A", ".lora_B"
"""Suffixes of an adapter's tensors, after the name of the weight that they change."""

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def merge_weight(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute the merged weight W + scale * B A, [out, in] in the dtype of W; computed in float32 or better.

    Args:
        base: [out, in] W.
        a: [rank, in] A.
        b: [out, rank] B.
        scale: alpha / rank.
    """
    # In bfloat16 the product of B and A would be rounded before it is added.
    kind = torch.promote_types(base.dtype, torch.float32)
    return torch.addmm(base.to(kind), b.to(kind), a.to(kind), alpha=scale).to(base.dtype)


def list_weight_files(folder: str) -> list[Path]:
    """List the safetensors files of a model folder.

    Raises:
        SyncError: there are none.
    """
    root = Path(folder)
    if (root / _INDEX).is_file():
        return [
            root / name
            for name in sorted(set(json.loads((root / _INDEX).read_text())["weight_map"].values()))
        ]
    if (root / _WHOLE).is_file():
        return [root / _WHOLE]
    raise SyncError(
        f"{root} has no weights ({_WHOLE}), to which adapters are added: put the start model there, on the "
        "machines of the trainer and of every server, or set train.lora.send=merged"
    )


def read_weight_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Read the shape of every tensor of a model folder, by name, without reading weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in list_weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - no mapping
    return shapes


def read_weights(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a model folder, in host memory; its files are mapped, not read as a whole."""
    for file in list_weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)


def add_adapters_to(
    weights: Iterable[tuple[str, torch.Tensor]], adapters: Mapping[str, torch.Tensor], base: AdapterBase
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights of the start model as the trainer has them, with adapters added where there are some.

    Args:
        weights: of the start model.
        adapters: by the weight's name with the suffix A or B.
        base: dtype of the trainer's weights, and scale of the adapters.

    Raises:
        SyncError: the start model lacks a weight that has adapters; raised after all others.
    """
    dtype: torch.dtype = getattr(torch, base.dtype)
    missing = {name.removesuffix(A) for name in adapters if name.endswith(A)}
    for name, stored in weights:
        # Buffers of integers keep their type.
        weight = stored.to(dtype) if stored.is_floating_point() else stored
        if name in missing:
            missing.discard(name)
            weight = merge_weight(weight, adapters[name + A], adapters[name + B], base.scale)
        yield name, weight
    if missing:
        raise SyncError(f"{base.folder} has no {', '.join(sorted(missing))}, to which adapters belong")
