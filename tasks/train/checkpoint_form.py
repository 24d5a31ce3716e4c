"""How a model's parameters make up the tensors of a Hugging Face checkpoint, layer by layer.

transformers fuses in memory what its checkpoints keep apart, experts above all, and adapters lie beside the weights that
they belong to. Conversions never cross a decoder layer. Most of a checkpoint's tensors are a part of one parameter as
it lies in memory; which part is found by running the conversion once on tensors without data.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tasks.train.lora import adapters_of, merged, scale_of

_LAYER = re.compile(r"^(.*?\.\d+)\.|^(.*)\.(?:base_layer|lora_[AB])\.")


class WeightMeta(NamedTuple):
    """Name, shape and type of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor lies in memory: one after another in the flat parameter, from byte `start` on."""

    parameter: str
    start: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that a part of a checkpoint is made of.

    Attributes:
        parameters: their names in the model.
        tensors: of the checkpoint.
        origins: of each tensor; None where some are not a part of a parameter, but computed or put in another order.
    """

    parameters: tuple[str, ...]
    tensors: tuple[WeightMeta, ...]
    origins: tuple[Origin, ...] | None


def weight_layers(model: PreTrainedModel) -> list[Layer]:
    """All weights, adapters merged into them; a tied head is left out, it is the embedding."""
    return [
        _layer(model, dict(parameters)) for _, parameters in groupby(model.named_parameters(), key=layer_of)
    ]


def adapter_layers(model: PreTrainedModel) -> list[Layer]:
    """Every adapter's A and B, by the checkpoint's name of the weight that they belong to."""
    names = {id(each): name for name, each in model.named_parameters()}
    layers = []
    for name, parameter in adapters_of(dict(model.named_parameters())).items():
        stem, kind = name.removesuffix(".weight").rsplit(".", 1)
        (stored,) = revert_weight_conversion(model, {f"{stem}.weight": torch.empty(0, device="meta")})
        meta = WeightMeta(f"{stored}.{kind}", whole_shape(parameter), parameter.dtype)
        own = names[id(parameter)]
        layers.append(Layer((own,), (meta,), (Origin(own, 0),)))
    return layers


def checkpoint_tensors(
    model: PreTrainedModel, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors of a layer's whole parameters, by name; some are views of them."""
    whole = {name: each.detach() for name, each in parameters.items()}
    made: dict[str, torch.Tensor] = revert_weight_conversion(model, merged(whole, scale_of(model)))
    return made


def whole_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter that DeepSpeed may have partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def layer_of(item: tuple[str, torch.nn.Parameter]) -> str:
    """The decoder layer, or the module with adapters, of a named parameter; else its own name."""
    match = _LAYER.match(item[0])
    return (match.group(1) or match.group(2)) if match else item[0]


class _Viewing(TorchFunctionMode):
    """Leaves out copies into another layout, so that a result shows by its strides where its numbers lie."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _layer(model: PreTrainedModel, parameters: dict[str, torch.nn.Parameter]) -> Layer:
    empty = {
        name: torch.empty(whole_shape(each), dtype=each.dtype, device="meta")
        for name, each in parameters.items()
    }
    are_dense = all(getattr(each, "ds_tensor", each).is_contiguous() for each in parameters.values())
    try:
        with _Viewing():
            made = revert_weight_conversion(model, merged(empty, 1.0))
        origins = _origins(made.values(), empty) if are_dense else None
    except RuntimeError:  # a conversion that needs the other layout
        made, origins = revert_weight_conversion(model, merged(empty, 1.0)), None
    tensors = tuple(WeightMeta(name, tuple(each.shape), each.dtype) for name, each in made.items())
    return Layer(tuple(parameters), tensors, origins)


def _origins(
    views: Iterable[torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> tuple[Origin, ...] | None:
    owners = {each.untyped_storage()._cdata: name for name, each in parameters.items()}
    origins = []
    for view in views:
        owner = owners.get(view.untyped_storage()._cdata)
        if owner is None or not view.is_contiguous() or view.dtype != parameters[owner].dtype:
            return None
        origins.append(Origin(owner, int(view.storage_offset()) * view.itemsize))
    return tuple(origins)
