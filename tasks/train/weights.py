"""Whole weights under the names and shapes of a Hugging Face checkpoint; under ZeRO-3 no rank holds more than a layer."""

import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from tasks.errors import StoreError, SyncError
from tasks.store.layout import RunFolder
from tasks.store.policies import publish_policy, unfinished_policy
from tasks.sync.adapters import A, AdapterBase, weight_shapes
from tasks.train.checkpoint_form import adapter_layers, checkpoint_tensors, layer_of
from tasks.train.deepspeed_library import deepspeed
from tasks.train.lora import adapters_of, merged, save_adapters, scale_of

_TOKENIZER_FILES = ("tokenizer*", "*_tokens*.json", "vocab.*", "merges.txt", "chat_template*")


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight whole, in an order that is the same each time; under ZeRO-3 a collective of all ranks.

    Adapters are merged into the weights that they belong to. A tied head is left out: it is the embedding.
    Tensors may be views of the live weights.
    """
    for _, layer in groupby(model.named_parameters(), key=layer_of):
        parameters = dict(layer)
        with deepspeed.zero.GatheredParameters(list(parameters.values())), torch.no_grad():
            yield from checkpoint_tensors(model, parameters).items()


def adapter_base(model: PreTrainedModel) -> AdapterBase:
    """The start model's folder, to which adapters are added where they arrive alone.

    Raises:
        SyncError: its weights are not there under the names and with the shapes that the adapters are for.
    """
    folder = str(Path(model.name_or_path or "").absolute())
    stored, metas = weight_shapes(folder), [layer.tensors[0] for layer in adapter_layers(model)]
    for a, b in zip(metas[::2], metas[1::2], strict=True):
        name, shape = a.name.removesuffix(A), (b.shape[0], a.shape[1])
        if stored.get(name) != shape:
            raise SyncError(
                f"{folder} has {name} as {stored.get(name)}, the adapters are for {shape}: set train.lora.send=merged"
            )
    return AdapterBase(folder, str(model.dtype).removeprefix("torch."), scale_of(model))


def export_policy(model: PreTrainedModel, folder: str, *, is_writer: bool) -> None:
    """Write a Hugging Face model folder, with the tokenizer of the folder that the model was read from.

    Adapters are merged into the weights that they belong to, and lie in peft's format in FOLDER/adapter besides.
    One rank writes; under ZeRO-3 it is a collective of all ranks.
    """
    persistent, scale = model.state_dict().keys(), scale_of(model)
    state = {name: each for name, each in model.named_buffers() if name in persistent}
    alone: dict[str, torch.Tensor] = {}
    for _, layer in groupby(model.named_parameters(), key=layer_of):
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


def store_policy(
    model: PreTrainedModel, run: RunFolder, version: int, incarnation: int, *, is_writer: bool
) -> str:
    """Write a version into a run's policies, as `export_policy`; where it is, on the rank that writes.

    Raises:
        LeaseLostError: the run is on S3, and a newer trainer has loaded it.
        StoreError: it could not be stored.
    """
    unfinished = unfinished_policy(run, version)
    try:
        export_policy(model, str(unfinished), is_writer=is_writer)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {unfinished}: {error}; make room") from error
    return publish_policy(run, version, incarnation) if is_writer else ""
