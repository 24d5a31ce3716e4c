"""The policy: a causal language model whose head runs on chosen positions only."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HeadPositions:
    """Hands the model's head the hidden states of `positions` alone.

    Over a large vocabulary the head is the dearest layer and its logits the largest tensor, and prompts need
    neither. As a hook on the head it leaves what a model does to its logits (scaling, soft caps) in place.

    Attributes:
        positions: [N] places in the flattened [B * T]; the logits are then [N, V].
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.positions = torch.empty(0, dtype=torch.int64)
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def _select(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = inputs
        return hidden.flatten(0, 1).index_select(0, self.positions), *others


def load_policy(folder: str, dtype: str) -> PreTrainedModel:
    """Read a Hugging Face model folder, without dropout.

    Raises:
        ConfigError: there is no such model.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError("model", folder, "there is no model folder (config.json and weights) at this path")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], local_files_only=True
    )
    model.eval()
    return model


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probabilities of the targets, with a gradient, and [N] entropies; in nats.

    Args:
        logits: [N, V]; the softmax is in at least single precision, of logits divided by the temperature.
        targets: [N] token ids.
        temperatures: [N].
        entropy_gradient: True for entropies with a gradient; without, they cost no memory.
    """
    precise = logits if logits.dtype == torch.float64 else logits.float()
    log_probabilities = torch.log_softmax(precise / temperatures.unsqueeze(1), dim=1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(log_probabilities.exp() * log_probabilities).nan_to_num(nan=0.0).sum(1)
    return log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1), entropies
