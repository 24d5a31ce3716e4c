"""The weights under the names and shapes of a Hugging Face checkpoint.

In memory adapters lie beside the weights that they belong to, and transformers fuses what its checkpoints keep apart,
experts above all; servers and model folders want the checkpoint's form. Conversions never cross a decoder layer, so
weights are turned back layer by layer, and under ZeRO-3 no rank ever holds more than one layer whole.
"""

import re
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tasks.errors import SyncError
from tasks.sync.adapters import A, AdapterBase, weight_shapes
from tasks.train.deepspeed_library import deepspeed
from tasks.train.lora import adapters_of, merged, save_adapters, scale_of

_TOKENIZER_FILES = ("tokenizer*", "*_tokens*.json", "vocab.*", "merges.txt", "chat_template*")
_LAYER = re.compile(r"^(.*?\.\d+)\.|^(.*)\.(?:base_layer|lora_[AB])\.")


class WeightMeta(NamedTuple):
    """Name, shape and type of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight whole, in an order that is the same each time; under ZeRO-3 a collective of all ranks.

    Adapters are merged into the weights that they belong to. A tied head is left out: it is the embedding.
    Tensors may be views of the live weights.
    """
    for _, layer in groupby(model.named_parameters(), key=_layer_of):
        parameters = dict(layer)
        with deepspeed.zero.GatheredParameters(list(parameters.values())), torch.no_grad():
            whole = {name: each.detach() for name, each in parameters.items()}
            yield from revert_weight_conversion(model, merged(whole, scale_of(model))).items()


def weight_metas(model: PreTrainedModel) -> list[WeightMeta]:
    """What `named_weights` yields, without a collective and without data."""
    metas = []
    for _, layer in groupby(model.named_parameters(), key=_layer_of):
        empty = {
            name: torch.empty(getattr(each, "ds_shape", each.shape), dtype=each.dtype, device="meta")
            for name, each in layer
        }
        metas += [
            WeightMeta(name, tuple(each.shape), each.dtype)
            for name, each in revert_weight_conversion(model, merged(empty, 1.0)).items()
        ]
    return metas


def adapter_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every adapter's A and B, by the checkpoint's name of the weight they belong to; under ZeRO-3 a collective."""
    for name, parameter in _adapter_parameters(model):
        with deepspeed.zero.GatheredParameters([parameter]):
            yield name, parameter.detach()


def adapter_metas(model: PreTrainedModel) -> list[WeightMeta]:
    """What `adapter_weights` yields, without a collective and without data."""
    return [
        WeightMeta(name, tuple(getattr(each, "ds_shape", each.shape)), each.dtype)
        for name, each in _adapter_parameters(model)
    ]


def adapter_base(model: PreTrainedModel) -> AdapterBase:
    """The start model's folder, to which adapters are added where they arrive alone.

    Raises:
        SyncError: its weights are not there under the names and with the shapes that the adapters are for.
    """
    folder = str(Path(model.name_or_path or "").absolute())
    stored, metas = weight_shapes(folder), adapter_metas(model)
    for a, b in zip(metas[::2], metas[1::2], strict=True):
        name, shape = a.name.removesuffix(A), (b.shape[0], a.shape[1])
        if stored.get(name) != shape:
            raise SyncError(
                f"{folder} has {name} as {stored.get(name)}, the adapters are for {shape}: set train.lora.send=merged"
            )
    return AdapterBase(folder, str(model.dtype).removeprefix("torch."), scale_of(model))


def _adapter_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in adapters_of(dict(model.named_parameters())).items():
        stem, kind = name.removesuffix(".weight").rsplit(".", 1)
        (stored,) = revert_weight_conversion(model, {f"{stem}.weight": torch.empty(0, device="meta")})
        yield f"{stored}.{kind}", parameter


def export_policy(model: PreTrainedModel, folder: str, *, is_writer: bool) -> None:
    """Write a Hugging Face model folder, with the tokenizer of the folder that the model was read from.

    Adapters are merged into the weights that they belong to, and lie in peft's format in FOLDER/adapter besides.
    One rank writes; under ZeRO-3 it is a collective of all ranks.
    """
    persistent, scale = model.state_dict().keys(), scale_of(model)
    state = {name: each for name, each in model.named_buffers() if name in persistent}
    alone: dict[str, torch.Tensor] = {}
    for _, layer in groupby(model.named_parameters(), key=_layer_of):
        parameters = dict(layer)
        with deepspeed.zero.GatheredParameters(list(parameters.values())), torch.no_grad():
            if is_writer:
                whole = {name: each.detach().cpu().clone() for name, each in parameters.items()}
                state |= merged(whole, scale)
                alone |= adapters_of(whole)
    if is_writer:
        model.save_pretrained(folder, state_dict=state)
        if alone:
            save_adapters(model, alone, Path(folder) / "adapter")
        for pattern in _TOKENIZER_FILES if model.name_or_path else ():
            for file in Path(model.name_or_path or "").glob(pattern):
                shutil.copy(file, folder)


def _layer_of(item: tuple[str, torch.nn.Parameter]) -> str:
    match = _LAYER.match(item[0])
    return (match.group(1) or match.group(2)) if match else item[0]
