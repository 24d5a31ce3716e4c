"""Which parameters, or slices of them, are the tensors of a Hugging Face checkpoint, layer by layer.

transformers fuses tensors that its checkpoints keep separate, experts above all, and adapters are separate parameters.
Conversions never cross a decoder layer. Most of a checkpoint's tensors are a contiguous slice of one parameter; which
slice is found by running the conversion once on tensors without data.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rollmill.tasks.train.engine.lora import adapter_scale, merge_adapters, select_adapters
from rollmill.tasks.train.engine.private_deepspeed import local_tensor, whole_shape
from rollmill.tasks.train.engine.private_transformers import checkpoint_names

_LAYER = re.compile(r"^(.*?\.\d+)\.|^(.*)\.(?:base_layer|lora_[AB])\.")


class WeightMeta(NamedTuple):
    """Name, shape and type of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Place of a Hugging Face checkpoint's tensor in a model's flattened parameter: contiguous, from byte `start` on."""

    parameter: str
    start: int


@dataclass(frozen=True, slots=True)
class CheckpointLayer:
    """Parameters of one decoder layer, and the Hugging Face checkpoint's tensors that are made of them.

    Attributes:
        parameters: names of the parameters in the model.
        tensors: name, shape and type of each tensor in the checkpoint.
        origins: place of each tensor in a parameter; None if some tensor is not a contiguous part of one.
    """

    parameters: tuple[str, ...]
    tensors: tuple[WeightMeta, ...]
    origins: tuple[ParameterSlice, ...] | None


def weight_layers(model: PreTrainedModel) -> list[CheckpointLayer]:
    """Return the layers of the whole model with adapters merged; a head that shares the embedding's weight is left out."""
    return [
        _layer(model, dict(parameters)) for _, parameters in groupby(model.named_parameters(), key=layer_name)
    ]


def adapter_layers(model: PreTrainedModel) -> list[CheckpointLayer]:
    """Return one CheckpointLayer for each adapter matrix A or B, named after the checkpoint's weight that it adapts."""
    names = {id(each): name for name, each in model.named_parameters()}
    layers = []
    for name, parameter in select_adapters(dict(model.named_parameters())).items():
        stem, kind = name.removesuffix(".weight").rsplit(".", 1)
        (stored,) = checkpoint_names(model, {f"{stem}.weight": torch.empty(0, device="meta")})
        meta = WeightMeta(f"{stored}.{kind}", whole_shape(parameter), parameter.dtype)
        own = names[id(parameter)]
        layers.append(CheckpointLayer((own,), (meta,), (ParameterSlice(own, 0),)))
    return layers


def checkpoint_tensors(
    model: PreTrainedModel, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Convert one layer's whole parameters, adapters merged, to a Hugging Face checkpoint's tensors, by name."""
    whole = {name: each.detach() for name, each in parameters.items()}
    return checkpoint_names(model, merge_adapters(whole, adapter_scale(model)))


def layer_name(item: tuple[str, torch.nn.Parameter]) -> str:
    """Return the name of the decoder layer or adapted module that a (name, parameter) is in, else the parameter's name."""
    match = _LAYER.match(item[0])
    return (match.group(1) or match.group(2)) if match else item[0]


class _Viewing(TorchFunctionMode):
    """Mode in which `contiguous()` copies nothing: a converted tensor's strides and offset show its place in a parameter."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _layer(model: PreTrainedModel, parameters: dict[str, torch.nn.Parameter]) -> CheckpointLayer:
    empty = {
        name: torch.empty(whole_shape(each), dtype=each.dtype, device="meta")
        for name, each in parameters.items()
    }
    are_dense = all(local_tensor(each).is_contiguous() for each in parameters.values())
    try:
        with _Viewing():
            made = checkpoint_names(model, merge_adapters(empty, 1.0))
        origins = _find_slices(made.values(), empty) if are_dense else None
    # Without `contiguous()` some views cannot be reshaped: such a layer is made from its whole parameters at each sync.
    except RuntimeError:
        # A conversion that needs the other layout.
        made, origins = checkpoint_names(model, merge_adapters(empty, 1.0)), None
    tensors = tuple(WeightMeta(name, tuple(each.shape), each.dtype) for name, each in made.items())
    return CheckpointLayer(tuple(parameters), tensors, origins)


def _find_slices(
    views: Iterable[torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> tuple[ParameterSlice, ...] | None:
    # A storage is one object as long as a tensor has it; on the meta device it has no address.
    owners = {id(each.untyped_storage()): name for name, each in parameters.items()}
    origins = []
    for view in views:
        owner = owners.get(id(view.untyped_storage()))
        if owner is None or not view.is_contiguous() or view.dtype != parameters[owner].dtype:
            return None
        origins.append(ParameterSlice(owner, int(view.storage_offset()) * view.itemsize))
    return tuple(origins)
