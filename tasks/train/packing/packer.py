"""Chooses the layout of a model's micro-batches, plans them, and builds their tensors."""

import copy
import inspect
import logging
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.private_transformers import carries_state, takes_attention
from rollmill.tasks.train.packing.micro_batch import MicroBatch, build_micro_batch
from rollmill.tasks.train.packing.packing_plan import (
    Layout,
    RowNumbers,
    TokenBudget,
    pack_padded,
    pack_varlen,
)
from rollmill.tasks.train.packing.prefixes import group_by_prefix
from rollmill.tasks.train.packing.varlen import ATTENTION, build_sequence
from rollmill.tasks.train.samples import Samples

_LOG = logging.getLogger(__name__)
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def choose_layout(model: PreTrainedModel, config: TrainConfig, device: torch.device) -> Layout:
    """Choose padded or varlen (packed) rows by `train.layout`; for varlen the model's attention is replaced.

    `auto` is varlen wherever the model and the machine support it: on CPU, where it was measured (docs/performance.md) as
    quicker when rows share a prompt and as quick when they do not, and in bfloat16 on CUDA, whose kernel has no float32.

    A model whose attention refuses a trial sequence is padded, and the trainer's log says so.

    Raises:
        ConfigError: varlen is set, and the model or the machine does not support it.
    """
    obstacle = _obstacle(model, config, device)
    if not obstacle and config.layout != "padded" and (obstacle := _try_varlen(model)):
        _LOG.warning("train.layout = %r: rows are padded, since %s", config.layout, obstacle)
    if config.layout == "varlen" and obstacle:
        raise ConfigError("train.layout", "varlen", f"{obstacle}; set it to padded")
    if config.layout == "padded" or obstacle:
        return "padded"
    # transformers finds an attention by its registered name, and passes the packed sequence to it.
    model.set_attn_implementation(ATTENTION)
    return "varlen"


# By model type, what a trial without weights does not show (transformers 5.23).
_PADDED_MODELS = {
    "mimo_v2_flash": "layers have attention sinks",
    "phimoe": "attention is not given its sliding window",
}


def _obstacle(model: PreTrainedModel, config: TrainConfig, device: torch.device) -> str:
    """Return the reason why a model's rows cannot be packed into one sequence; empty if they can."""
    name, settings = type(model).__name__, model.config.get_text_config()
    if device.type == "cuda" and config.dtype == "float32":
        return "the kernel on CUDA has no float32"
    if not takes_attention(model):
        return f"{name} has a custom attention"
    if carries_state(model):
        return f"{name} is recurrent: its state would pass from one packed row to the next"
    if others := set(getattr(settings, "layer_types", None) or ()) - _KNOWN_LAYERS:
        return f"{name} has layers of {', '.join(sorted(others))}"
    if reason := _PADDED_MODELS.get(settings.model_type):
        return f"{name}'s {reason}"
    if getattr(settings, "attn_logit_softcapping", None):
        return f"{name} caps the scores of its attention"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    return ""


def _try_varlen(model: PreTrainedModel) -> str:
    """Run a copy of the model on two packed rows, without weights; returns what its attention refuses, or an empty text.

    The copy is on the meta device, which has shapes only: so a trial needs no memory, also when ranks hold the weights in parts.
    """
    device = torch.device("meta")
    packed = build_sequence([np.arange(3), np.arange(3, 5)], device)
    settings = copy.deepcopy(model.config)
    try:
        with device, torch.no_grad():
            trial = AutoModelForCausalLM.from_config(settings, attn_implementation=ATTENTION).eval()
            tokens = torch.zeros(1, 5, dtype=torch.int64)
            trial(input_ids=tokens, position_ids=packed.position_ids, packed=packed, use_cache=False)
    except ConfigError as error:
        return error.remedy.removesuffix("; set it to padded")
    except (NotImplementedError, RuntimeError) as error:
        # The model reads values, such as the experts that are chosen: without weights only the layers before were tried.
        _LOG.debug("the varlen trial of %s ended early: %s", type(model).__name__, error)
    return ""


OVERHEAD_TOKENS = 64
"""Fixed cost of one more forward and backward pass, in tokens; padding is weighed against it."""


class Packer:
    """Plans a policy's micro-batches, and builds their tensors.

    Attributes:
        layout: padded: rows side by side as [B, T]; varlen: rows packed into one sequence.
    """

    def __init__(self, config: TrainConfig, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._budget = TokenBudget(config.micro_batch_tokens, OVERHEAD_TOKENS)

    def plan(self, samples: Samples, rows: Sequence[int], n_ranks: int) -> list[list[RowNumbers]]:
        """Divide rows into micro-batches: for each of the W ranks equally many lists of row numbers.

        Args:
            samples: the batch.
            rows: row numbers to divide; each row has a trained token.
            n_ranks: number of ranks, W.
        """
        if self.layout == "varlen":
            return pack_varlen(group_by_prefix(samples, rows), n_ranks, self._budget.tokens)
        shares = pack_padded([len(samples.token_ids[row]) for row in rows], n_ranks, self._budget)
        return [[[rows[place] for place in cut] for cut in share] for share in shares]

    def micro_batch(self, samples: Samples, rows: RowNumbers, env_names: list[str]) -> MicroBatch:
        """Build the tensors of one micro-batch from its row numbers.

        Args:
            samples: the batch.
            rows: the micro-batch's row numbers, from `plan`.
            env_names: the batch's environments, sorted.
        """
        return build_micro_batch(samples, rows, env_names, self._device, self.layout)
