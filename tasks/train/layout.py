"""Which layout a model's micro-batches have, and the plan of a batch in it."""

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tasks.errors import ConfigError
from tasks.train.config import TrainConfig
from tasks.train.line import ATTENTION
from tasks.train.micro_batch import MicroBatch, micro_batch
from tasks.train.packing import Budget, Layout, RowNumbers, pack, pack_line
from tasks.train.prefixes import units_of
from tasks.train.samples import Samples

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def choose_layout(model: PreTrainedModel, config: TrainConfig, device: torch.device) -> Layout:
    """The layout that `train.layout` asks for, and the model's attention made ready for it.

    `auto` is varlen wherever that is possible: on CPU, where it was measured (docs/performance.md) as quicker when rows share
    a prompt and as quick when they do not, and in bfloat16 on CUDA, whose kernels know no other type.

    Raises:
        ConfigError: varlen is asked for, and the model or the machine cannot.
    """
    obstacle = _obstacle(model, config, device)
    if config.layout == "varlen" and obstacle:
        raise ConfigError("train.layout", "varlen", f"{obstacle}; set it to padded")
    if config.layout == "padded" or obstacle:
        return "padded"
    model.set_attn_implementation(ATTENTION)
    return "varlen"


def _obstacle(model: PreTrainedModel, config: TrainConfig, device: torch.device) -> str:
    """Why rows cannot lie in a line; empty when they can."""
    name, settings = type(model).__name__, model.config.get_text_config()
    if device.type == "cuda" and config.dtype == "float32":
        return "the kernel on CUDA has no float32"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} has an attention of its own"
    if getattr(model, "_is_stateful", False):
        return f"{name} carries a state from token to token that knows no rows"
    if others := set(getattr(settings, "layer_types", None) or ()) - _KNOWN_LAYERS:
        return f"{name} has layers of {', '.join(sorted(others))}"
    if getattr(settings, "attn_logit_softcapping", None):
        return f"{name} caps the scores of its attention"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    return ""


class Packer:
    """Plans a policy's micro-batches, and makes them.

    Attributes:
        layout: how the policy's rows lie together.
    """

    def __init__(self, config: TrainConfig, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self._device, self._budget = (
            device,
            Budget(config.micro_batch_tokens, config.micro_batch_overhead_tokens),
        )

    def plan(self, samples: Samples, rows: Sequence[int], n_ranks: int) -> list[list[RowNumbers]]:
        """[W] micro-batches of each rank, as row numbers of the batch, as many on every rank.

        Args:
            samples: the batch.
            rows: which of its rows; each has a trained token.
            n_ranks: W.
        """
        if self.layout == "varlen":
            return pack_line(units_of(samples, rows), n_ranks, self._budget.tokens)
        shares = pack([len(samples.token_ids[row]) for row in rows], n_ranks, self._budget)
        return [[[rows[place] for place in cut] for cut in share] for share in shares]

    def micro_batch(self, samples: Samples, rows: RowNumbers, env_names: list[str]) -> MicroBatch:
        """Tensors of one micro-batch of a plan."""
        return micro_batch(samples, rows, env_names, self._device, self.layout)
