"""Low-rank adapters on a frozen model, through the library peft.

A linear layer with the weight W computes W x + (alpha / rank) B A x, of which A and B alone are trained: eq. 3 of
Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685. B begins as zero, so that
version 0 is the start model.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import peft
import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.sync.adapters import merge_weight
from rollmill.tasks.train.config import LoraConfig
from rollmill.tasks.train.engine.private_deepspeed import whole_shape

Kind = TypeVar("Kind", bound=torch.Tensor)

_NAME = "default"
# Fixed, so that a run resumed before its first checkpoint begins with the same adapters.
_SEED = 0
_BASE, _A, _B = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
# What a mixture of experts calls parts of its experts and routers; peft would adapt the experts in their place.
_EXPERT_LAYERS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze a model and give its linear layers adapters, the same on every rank and at every start.

    The experts and routers of a mixture of experts, embeddings and the output head get none.

    Raises:
        ConfigError: `config.targets` names a module that is not there or cannot have an adapter.
    """
    targets = _targets(model, config)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # annotated as an integer, used as a number
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    # A separate seed: adapters start the same on every rank, whatever was drawn before.
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        peft.inject_adapter_in_model(settings, model, _NAME)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    if trained != {target + end for target in targets for end in (_A, _B)}:
        raise ConfigError(
            "train.lora.targets", config.targets, "peft cannot adapt these layers of this model"
        )
    model.eval()


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the full names of the linear layers that get adapters; ConfigError if a name in `config.targets` matches none."""
    head = model.get_output_embeddings()
    linear = [
        name for name, each in model.named_modules() if type(each) is torch.nn.Linear and each is not head
    ]
    # Experts that are fused into one parameter, [experts, outputs, inputs], mark a mixture of experts.
    if any(len(whole_shape(each)) == 3 for each in model.parameters()):
        linear = [name for name in linear if name.rpartition(".")[2] not in _EXPERT_LAYERS]
    ends = {end: [name for name in linear if f".{name}".endswith(f".{end}")] for end in config.targets}
    if missing := [end for end, names in ends.items() if not names]:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            "train.lora.targets", ", ".join(missing), f"layers that can have adapters are {known}"
        )
    return [name for name in linear if not ends or any(name in names for names in ends.values())]


def adapter_settings(model: PreTrainedModel) -> peft.LoraConfig | None:
    """Settings in peft of a model's adapters; None without adapters."""
    known = getattr(model, "peft_config", None)
    return known[_NAME] if known else None


def adapter_scale(model: PreTrainedModel) -> float:
    """Scale of a model's adapters, alpha / rank; 1 without adapters."""
    settings = adapter_settings(model)
    return settings.lora_alpha / settings.r if settings else 1.0


def merge_adapters(parameters: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Return the parameters under the base model's names, with the adapters added to the weights that they adapt.

    Args:
        parameters: unpartitioned parameters by name; with a weight that has an adapter, its A and B.
        scale: alpha / rank.
    """
    found = {}
    for name, each in parameters.items():
        if name.endswith((_A, _B)):
            continue
        stem, _, kind = name.partition(_BASE)
        if kind == "weight":
            each = merge_weight(each, parameters[stem + _A], parameters[stem + _B], scale)
        found[f"{stem}.{kind}" if kind else name] = each
    return found


def select_adapters(parameters: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return only the adapter matrices among parameters, under names without peft's adapter name.

    Example: "model.layers.0.mlp.up_proj.lora_A.default.weight" becomes "model.layers.0.mlp.up_proj.lora_A.weight".
    """
    return {
        name.replace(f".{_NAME}.", "."): each for name, each in parameters.items() if name.endswith((_A, _B))
    }


def save_adapters(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write adapters, named as by `select_adapters`, in peft's format."""
    settings = copy.deepcopy(adapter_settings(model))
    if settings is None:
        raise ValueError("a model without adapters has none to write")
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    save_file(
        {f"base_model.model.{name}": each for name, each in tensors.items()},
        folder / SAFETENSORS_WEIGHTS_NAME,
    )
