"""Every use of what transformers and peft have and do not document. Seen in transformers 5.23.0 and peft 0.21.2.

| undocumented | for | without it |
|---|---|---|
| `core_model_loading.revert_weight_conversion` | a model's parameters under a checkpoint's names | nothing can be sent or stored |
| `modeling_layers.GradientCheckpointingLayer` | layers that compute their activations again | train.gradient_checkpointing is refused |
| `PreTrainedModel._supports_attention_backend`, `_is_stateful` | whether a model accepts a registered attention | rows are padded |
| classes named `*Router` with `top_k`, `num_experts` | routers of a mixture of experts | train.replay_routing is refused |
| `tuners_utils.BaseTunerLayer` | layers whose adapters can be switched off | the reference needs a copy of the start model |
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from rollmill.tasks.errors import LibraryError

SEEN_IN = "5.23.0"

try:
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError as error:
    raise LibraryError("transformers", transformers.__version__, SEEN_IN, str(error)) from error

__all__ = ["BaseTunerLayer", "GradientCheckpointingLayer"]


def checkpoint_names(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors under the names and in the shapes of a Hugging Face checkpoint; some are views of them."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def takes_attention(model: PreTrainedModel) -> bool:
    """True when the model's layers call an attention function that is registered by name."""
    return bool(getattr(model, "_supports_attention_backend", False))


def carries_state(model: PreTrainedModel) -> bool:
    """Return True for a recurrent model, whose state would leak from one packed row into the next."""
    return bool(getattr(model, "_is_stateful", False))


def is_router(module: Any) -> bool:
    """True for the router of a mixture of experts."""
    has_choice = hasattr(module, "top_k") and hasattr(module, "num_experts")
    return type(module).__name__.endswith("Router") and has_choice
