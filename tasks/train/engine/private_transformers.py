"""Every use of what transformers and peft have and do not document. Seen in transformers 5.23.0 and peft 0.21.2.

| undocumented | for | without it |
|---|---|---|
| `core_model_loading.revert_weight_conversion` | a model's parameters under a checkpoint's names | nothing can be sent or stored |
| `PreTrainedModel._load_pretrained_model` | a model read a layer at a time | ZeRO-3 reads the whole model on every rank |
| `modeling_layers.GradientCheckpointingLayer` | layers that compute their activations again | train.gradient_checkpointing is refused |
| `PreTrainedModel._supports_attention_backend`, `_is_stateful` | whether a model accepts a registered attention | rows are padded |
| classes named `*Router` with `top_k`, `num_experts` | routers of a mixture of experts | train.replay_routing is refused |
| `tuners_utils.BaseTunerLayer` | layers whose adapters can be switched off | the reference needs a copy of the start model |
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from rollmill.tasks.errors import LibraryError

SEEN_IN = "5.23.0"

try:
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError as error:
    raise LibraryError("transformers", transformers.__version__, SEEN_IN, str(error)) from error

__all__ = ["BaseTunerLayer", "GradientCheckpointingLayer"]


def checkpoint_names(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors under the names and in the shapes of a Hugging Face checkpoint; some are views of them."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def takes_attention(model: PreTrainedModel) -> bool:
    """Return True if the model's layers call an attention function that is registered by name."""
    return bool(getattr(model, "_supports_attention_backend", False))


def carries_state(model: PreTrainedModel) -> bool:
    """Return True for a recurrent model, whose state would leak from one packed row into the next."""
    return bool(getattr(model, "_is_stateful", False))


def is_router(module: Any) -> bool:
    """Return True for the router of a mixture of experts."""
    has_choice = hasattr(module, "top_k") and hasattr(module, "num_experts")
    return type(module).__name__.endswith("Router") and has_choice


PartLoad: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Puts some of a checkpoint's tensors, by name, into a model."""


def model_class(folder: str) -> type[PreTrainedModel]:
    """Return the class that AutoModelForCausalLM chooses for a model folder, from its config.json; reads no weights.

    Raises:
        OSError, ValueError: there is no config.json, or transformers has no causal language model for it.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    return type(model)


def read_by_parts(
    kind: type[PreTrainedModel],
    folder: str,
    dtype: torch.dtype,
    load: Callable[[PreTrainedModel, Sequence[str], PartLoad], None],
) -> PreTrainedModel:
    """Load a model folder as `kind.from_pretrained` does, but let `load` read the weights, some tensors at a time.

    Args:
        kind: the model's class.
        folder: a Hugging Face model folder.
        dtype: type of the weights.
        load: gets the model on the meta device, the files, and a function that puts tensors into the model.
    """

    def load_all(
        model: PreTrainedModel, _: None, files: Sequence[str], load_config: Any, *others: Any
    ) -> tuple[Any, Any]:
        found: list[Any] = []

        def load_part(part: Mapping[str, Any]) -> None:
            info, _ = kind._load_pretrained_model(model, dict(part), None, load_config, *others)
            found.append(info)

        load(model, files, load_part)
        total = found[0]
        for info in found[1:]:
            # What a part lacks, another one has.
            total.missing_keys &= info.missing_keys
            total.unexpected_keys |= info.unexpected_keys
            total.mismatched_keys |= info.mismatched_keys
            total.conversion_errors.update(info.conversion_errors)
        return total, None

    members = {"__module__": kind.__module__, "_load_pretrained_model": staticmethod(load_all)}
    reader: Any = type(kind.__name__, (kind,), members)
    # It would show a bar for each part.
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: PreTrainedModel = reader.from_pretrained(folder, dtype=dtype, local_files_only=True)
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    model.__class__ = kind
    return model
