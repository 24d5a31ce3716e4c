"""Whole weights as a Hugging Face model folder; under ZeRO-3 no rank holds more than a layer.

`python -m rollmill.tasks.train.checkpoints.hf_export CONFIG.json` exports a checkpoint without a trainer.
"""

import shutil
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from rollmill.tasks.config import StageConfig
from rollmill.tasks.errors import StoreError, SyncError
from rollmill.tasks.store.checkpoints.checkpoint_marker import check_files, read_local_marker
from rollmill.tasks.store.checkpoints.checkpoint_store import publish_policy, staging_folder
from rollmill.tasks.store.filesystem import publish_path
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.lineage.lineage_writer import write_lineage
from rollmill.tasks.sync.adapters import A, read_weight_shapes
from rollmill.tasks.sync.weight_messages import AdapterBase
from rollmill.tasks.train.checkpoints.hf_layout import adapter_layers, checkpoint_tensors, layer_name
from rollmill.tasks.train.checkpoints.state_files import StateFiles, check_parameters
from rollmill.tasks.train.checkpoints.trainer_checkpoints import read_progress
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.lora import (
    adapter_scale,
    add_adapters,
    merge_adapters,
    save_adapters,
    select_adapters,
)
from rollmill.tasks.train.engine.optimizer_state import WEIGHT
from rollmill.tasks.train.engine.policy_model import load_policy
from rollmill.tasks.train.engine.private_deepspeed import deepspeed

_TOKENIZER_FILES = (
    "tokenizer*",
    "*_tokens*.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
)


def gather_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of every weight in a fixed order; under ZeRO-3 a collective of all ranks.

    Adapters are merged into the weights that they belong to. An output head that shares the embedding's weight is left out.
    Tensors may be views of the live weights.
    """
    for _, layer in groupby(model.named_parameters(), key=layer_name):
        parameters = dict(layer)
        with deepspeed.zero.GatheredParameters(list(parameters.values())), torch.no_grad():
            yield from checkpoint_tensors(model, parameters).items()


def adapter_base(model: PreTrainedModel) -> AdapterBase:
    """Return folder, dtype and adapter scale of the start model, after checking that it has the adapted weights.

    Raises:
        SyncError: a weight that has an adapter is missing in the start model's folder, or has another shape.
    """
    folder = str(Path(model.name_or_path or "").absolute())
    stored, metas = read_weight_shapes(folder), [layer.tensors[0] for layer in adapter_layers(model)]
    for a, b in zip(metas[::2], metas[1::2], strict=True):
        name, shape = a.name.removesuffix(A), (b.shape[0], a.shape[1])
        if stored.get(name) != shape:
            raise SyncError(
                f"{folder} has {name} as {stored.get(name)}, the adapters are for {shape}: set train.lora.send=merged"
            )
    return AdapterBase(folder, str(model.dtype).removeprefix("torch."), adapter_scale(model))


def export_policy(model: PreTrainedModel, folder: str, *, is_writer: bool) -> None:
    """Write a Hugging Face model folder, with the tokenizer of the folder that the model was read from.

    Adapters are merged into their weights, and also written in peft's format to FOLDER/adapter.
    Only the rank with `is_writer` writes; under ZeRO-3 it is a collective of all ranks.
    """
    persistent, scale = model.state_dict().keys(), adapter_scale(model)
    state = {name: each for name, each in model.named_buffers() if name in persistent}
    alone: dict[str, torch.Tensor] = {}
    for _, layer in groupby(model.named_parameters(), key=layer_name):
        parameters = dict(layer)
        with deepspeed.zero.GatheredParameters(list(parameters.values())), torch.no_grad():
            if is_writer:
                # A clone of each layer, since the gathered parameters are freed at the end of the block.
                whole = {name: each.detach().cpu().clone() for name, each in parameters.items()}
                state |= merge_adapters(whole, scale)
                alone |= select_adapters(whole)
    if is_writer:
        model.save_pretrained(folder, state_dict=state)
        if alone:
            save_adapters(model, alone, Path(folder) / "adapter")
        source = Path(model.name_or_path or "")
        for pattern in _TOKENIZER_FILES if model.name_or_path else ():
            for file in source.glob(pattern):
                copy = Path(folder) / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(file, copy)


def store_policy(
    model: PreTrainedModel, run: RunFolder, version: int, incarnation: int, *, is_writer: bool
) -> str:
    """Write a version's model into the run's folder of policies; returns its address where `is_writer`, else "".

    The content is that of `export_policy`, with lineage and model card; under ZeRO-3 it is a collective.

    Raises:
        LeaseLostError: the run is on S3, and a newer trainer has loaded it.
        StoreError: the folder could not be written or published.
    """
    unfinished = staging_folder(run, version)
    try:
        export_policy(model, str(unfinished), is_writer=is_writer)
        if is_writer:
            write_lineage(unfinished, run, version, Path(model.name_or_path or ""))
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {unfinished}: {error}; make room") from error
    return publish_policy(run, version, incarnation) if is_writer else ""


class ExportConfig(StageConfig):
    """Settings of an export of a checkpoint.

    Attributes:
        train: the run's settings of the trainer.
        model: folder of the run's start model, whose tokenizer goes with the weights.
        run: random id of the run.
        version: policy version of the checkpoint.
        checkpoint: folder of the checkpoint on this machine.
        output: path of the new model folder; it appears under this name only once complete.
        folder: location of the run, for lineage and model card; empty: neither is written.
    """

    train: TrainConfig
    model: str
    run: str
    version: int
    checkpoint: str
    output: str
    folder: str = ""


def main() -> None:
    """Export the checkpoint named by the configuration file in the first command-line argument."""
    config = ExportConfig.model_validate_json(Path(sys.argv[1]).read_text())
    torch.set_num_threads(config.train.threads)
    try:
        folder = Path(config.checkpoint)
        read_progress(folder, config.run, config.version)
        # A trainer that resumes compares sizes alone; an export compares the content too.
        check_files(folder, read_local_marker(folder).files or {})
        model = load_checkpoint_policy(config)
    except StoreError as error:
        sys.exit(str(error))
    output = Path(config.output)
    with publish_path(output) as staged:
        export_policy(model, str(staged), is_writer=True)
        if config.folder:
            write_lineage(staged, RunFolder(config.folder), config.version, Path(config.model))


@torch.no_grad()
def load_checkpoint_policy(config: ExportConfig) -> PreTrainedModel:
    """Load the start model, and a checkpoint's weights into it.

    Raises:
        StoreError: the checkpoint is of another model, or damaged.
    """
    model = load_policy(config.model, config.train.dtype)
    if config.train.lora.rank:
        add_adapters(model, config.train.lora)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with StateFiles(Path(config.checkpoint)) as files:
        check_parameters(files.shapes, {name: tuple(each.shape) for name, each in trained.items()})
        for name, each in trained.items():
            each.copy_(files.read(WEIGHT, name, 0, each.numel()).view(each.shape))
    return model


if __name__ == "__main__":
    main()
