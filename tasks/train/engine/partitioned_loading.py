"""Reading a model under ZeRO-3: a part is read, divided among the ranks and freed before the next one is read.

transformers reads every tensor before DeepSpeed divides the first. Here it is given a decoder layer at a time, so that a rank
holds its share of the model and one layer. transformers still renames, converts and ties what it is given.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.policy_model import DTYPES, load_policy
from rollmill.tasks.train.engine.private_deepspeed import deepspeed, is_sharded
from rollmill.tasks.train.engine.private_transformers import PartLoad, model_class, read_by_parts

# "model.layers.3." of "model.layers.3.mlp.up_proj.weight".
_LAYER = re.compile(r".*?\.\d+\.")

_ZERO_3 = 3


def load_trained(config: TrainConfig, folder: str) -> PreTrainedModel:
    """Read a Hugging Face model folder for training, without dropout; under ZeRO-3 divided among the ranks, a collective.

    Raises:
        ConfigError: there is no such model folder.
    """
    # Older formats can only be read whole.
    if config.zero_stage < _ZERO_3 or not any(Path(folder).glob("*.safetensors")):
        return load_policy(folder, config.dtype)
    is_offloaded = config.offload == "optimizer_and_weights"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": _ZERO_3,
            **({"offload_param": {"device": "cpu", "pin_memory": True}} if is_offloaded else {}),
        },
    }
    return _load_partitioned(folder, DTYPES[config.dtype], settings)


def _load_partitioned(folder: str, dtype: torch.dtype, settings: Mapping[str, Any]) -> PreTrainedModel:
    """Read a model folder of safetensors with the parameters divided among the ranks; a collective.

    Args:
        folder: a Hugging Face model folder, the same on every rank.
        dtype: type of the weights.
        settings: DeepSpeed's configuration, of ZeRO stage 3.
    """

    def load(model: PreTrainedModel, files: Sequence[str], load_part: PartLoad) -> None:
        for keys in _parts(files):
            with ExitStack() as opened:
                # Opened for each part: a mapped file stays resident until it is closed.
                part = {
                    key: opened.enter_context(safe_open(file, framework="pt")).get_slice(key)
                    for key, file in keys.items()
                }
                load_part(part)
                del part
                _divide(model, settings)

    return read_by_parts(model_class(folder), folder, dtype, load)


def _parts(files: Sequence[str]) -> Iterator[dict[str, str]]:
    """File of each tensor, by its name: those of a decoder layer together, others one by one."""
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                layer = _LAYER.match(key)
                parts[layer.group() if layer else key][key] = file
    yield from parts.values()


def _divide(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Leave each rank its share of the parameters that were just read; a collective."""
    fresh = [each for each in model.parameters() if not (each.is_meta or is_sharded(each))]
    if fresh:
        deepspeed.zero.Init(module=torch.nn.ParameterList(fresh), config_dict_or_path=dict(settings))
