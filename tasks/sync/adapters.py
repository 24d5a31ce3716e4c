"""Low-rank adapters that travel alone: the server adds them to the start model's weights, which it reads from its folder.

With W of the start model and the adapters' A and B the new weight is W + (alpha / rank) B A: Hu et al. 2021,
arXiv:2106.09685, eq. 3. Trainer and server compute it by the same function.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from tasks.errors import SyncError

A, B = ".lora_A", ".lora_B"
"""What the names of an adapter's tensors have after the name of the weight that they belong to."""

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """What adapters are added to.

    Attributes:
        folder: the start model's, at the same path on the trainer's and the servers' machines.
        dtype: torch's name of the type that the trainer keeps weights in.
        scale: alpha / rank.
    """

    folder: str
    dtype: str
    scale: float


def merged_weight(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[out, in] W + scale * B A, computed in single precision at least, of the base's type.

    Args:
        base: [out, in] W.
        a: [rank, in] A.
        b: [out, rank] B.
        scale: alpha / rank.
    """
    kind = torch.promote_types(base.dtype, torch.float32)
    return torch.addmm(base.to(kind), b.to(kind), a.to(kind), alpha=scale).to(base.dtype)


def weight_files(folder: str) -> list[Path]:
    """The files with a model folder's weights.

    Raises:
        SyncError: there are none in the format safetensors.
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
        f"{root} has no weights ({_WHOLE}), which adapters alone are added to: put the start model there, on the "
        "trainer's machine and on every server's, or set train.lora.send=merged"
    )


def weight_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model folder; reads no weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - no mapping
    return shapes


def stored_weights(folder: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model folder; its files are mapped, not read as a whole."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name).to(device)


def with_adapters(
    weights: Iterable[tuple[str, torch.Tensor]], adapters: Mapping[str, torch.Tensor], base: AdapterBase
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights of the start model as the trainer has them, adapters added to those that have some.

    Args:
        weights: the start model's.
        adapters: by the weight's name, with A or B after it.
        base: type of the trainer's weights, and the adapters' scale.

    Raises:
        SyncError: adapters belong to a weight that is not there; all others were given before.
    """
    dtype: torch.dtype = getattr(torch, base.dtype)
    missing = {name.removesuffix(A) for name in adapters if name.endswith(A)}
    for name, stored in weights:
        weight = stored.to(dtype) if stored.is_floating_point() else stored
        if name in missing:
            missing.discard(name)
            weight = merged_weight(weight, adapters[name + A], adapters[name + B], base.scale)
        yield name, weight
    if missing:
        raise SyncError(f"{base.folder} has no {', '.join(sorted(missing))}, to which adapters belong")
