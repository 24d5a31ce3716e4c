"""The weights under the names and shapes of a Hugging Face checkpoint.

In memory transformers fuses what its checkpoints keep apart, experts above all; servers and model folders want
the checkpoint's form. Conversions never cross a decoder layer, so weights are turned back layer by layer, and
under ZeRO-3 no rank ever holds more than one layer whole.
"""

import re
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

_TOKENIZER_FILES = ("tokenizer*", "*_tokens*.json", "vocab.*", "merges.txt", "chat_template*")
_LAYER = re.compile(r"^(.*?\.\d+)\.")


class WeightMeta(NamedTuple):
    """Name, shape and type of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight whole, in an order that is the same each time; under ZeRO-3 a collective of all ranks.

    A tied head is left out: it is the embedding. Tensors may be views of the live weights.
    """
    for _, layer in groupby(model.named_parameters(), key=_layer_of):
        parameters = dict(layer)
        with deepspeed.zero.GatheredParameters(list(parameters.values())), torch.no_grad():
            whole = {name: each.detach() for name, each in parameters.items()}
            yield from revert_weight_conversion(model, whole).items()


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
            for name, each in revert_weight_conversion(model, empty).items()
        ]
    return metas


def export_policy(model: PreTrainedModel, folder: str, *, is_writer: bool) -> None:
    """Write a Hugging Face model folder, with the tokenizer of the folder that the model was read from.

    One rank writes; under ZeRO-3 it is a collective of all ranks.
    """
    persistent = model.state_dict().keys()
    state = {name: each for name, each in model.named_buffers() if name in persistent}
    for _, layer in groupby(model.named_parameters(), key=_layer_of):
        parameters = dict(layer)
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            if is_writer:
                state |= {name: each.detach().cpu().clone() for name, each in parameters.items()}
    if is_writer:
        model.save_pretrained(folder, state_dict=state)
        for pattern in _TOKENIZER_FILES if model.name_or_path else ():
            for file in Path(model.name_or_path or "").glob(pattern):
                shutil.copy(file, folder)


def _layer_of(item: tuple[str, torch.nn.Parameter]) -> str:
    match = _LAYER.match(item[0])
    return match.group(1) if match else item[0]
