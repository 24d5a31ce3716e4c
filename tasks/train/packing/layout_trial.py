"""Compares packed with padded rows by value, on a small model with random weights and the architecture of a given one."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.policy_model import DTYPES, PolicyModel
from rollmill.tasks.train.packing.packer import Packer
from rollmill.tasks.train.packing.packing_plan import Layout
from rollmill.tasks.train.packing.varlen import ATTENTION
from rollmill.tasks.train.samples import Samples

# Largest difference by rounding in single precision: of a token's log-probability in nats, and of the gradient relative to its norm.
_FLOAT32_LIMIT = 1e-3
# In half precision, the difference between the layouts as a multiple of that between half and single precision.
_HALF_FACTOR = 3.0
_MOST_PARAMETERS = 500_000_000
_LAYERS, _WIDTH, _WINDOW, _VOCABULARY = 2, 64, 8, 512


@dataclass(frozen=True, slots=True)
class LayoutTrial:
    """Log-probabilities and gradients of varlen rows against padded ones, on one device.

    Attributes:
        device: that computed them.
        dtype: number format of the weights.
        logprobs: largest difference of a token's log-probability, in nats.
        gradient: norm of the difference of all gradients, relative to their norm.
        limits: of these two, up to which they are rounding.
    """

    device: str
    dtype: str
    logprobs: float
    gradient: float
    limits: tuple[float, float]

    @property
    def is_equal(self) -> bool:
        """True if both differences are rounding."""
        return self.logprobs <= self.limits[0] and self.gradient <= self.limits[1]


def create_small_model(settings: PretrainedConfig, *, is_narrow: bool) -> PreTrainedModel:
    """Create a model of the same architecture with random weights: fewer layers, one of each kind at least, and tokens.

    Args:
        settings: of the model's architecture.
        is_narrow: True for fewer heads of the same size, which not every architecture can have.

    Raises:
        Exception: whatever the model's class raises of settings that it does not expect.
    """
    small = copy.deepcopy(settings)
    text = small.get_text_config()
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    n_all, kinds = text.num_hidden_layers, list(getattr(text, "layer_types", None) or ())
    n_layers = min(n_all, max([_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == n_all:
            setattr(text, name, value[:n_layers])
        elif isinstance(value, int) and name.endswith("intermediate_size"):
            setattr(text, name, min(value, _WIDTH))
        # Shorter than the trial's rows, so that layers with a window differ from those without.
        elif isinstance(value, int) and name == "sliding_window":
            setattr(text, name, min(value, _WINDOW))
        elif isinstance(value, int) and name.endswith("_token_id"):
            setattr(text, name, min(value, text.vocab_size - 1))
    text.num_hidden_layers = n_layers
    if is_narrow:
        heads, groups = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
        factor = math.gcd(text.hidden_size, heads, groups or heads)
        for name, value in (("hidden_size", text.hidden_size), ("num_attention_heads", heads)):
            setattr(text, name, value // factor)
        if groups:
            text.num_key_value_heads = groups // factor
    with torch.device("meta"):
        n_parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(small).parameters())
    if n_parameters > _MOST_PARAMETERS:
        raise ValueError(f"a small model of this architecture has {n_parameters:,} parameters")
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    model.eval()
    return model


def compare_layouts(model: PreTrainedModel, device: torch.device, dtype: str) -> LayoutTrial:
    """Run rows of uneven length, two with a common prefix, forward and backward, padded and then as one packed sequence.

    Args:
        model: from `create_small_model`; it is moved to the device, and its attention replaced.
        device: that computes.
        dtype: number format of the weights.

    Raises:
        ConfigError: the attention refuses packed rows.
    """
    module: torch.nn.Module = model
    module.to(device=device, dtype=DTYPES[dtype])
    precise = copy.deepcopy(model)
    policy = PolicyModel(model, is_partitioned=False, head_dtype="float32")
    padded = _run(policy, model, "padded", device)
    limits = (_FLOAT32_LIMIT, _FLOAT32_LIMIT)
    if dtype != "float32":
        exact = _run(PolicyModel(precise.float(), is_partitioned=False), precise, "padded", device)
        rounding = _measure_differences(padded, exact)
        limits = (_HALF_FACTOR * rounding[0], _HALF_FACTOR * rounding[1])
    # transformers finds an attention by its registered name, and passes the packed sequence to it.
    model.set_attn_implementation(ATTENTION)
    varlen = _run(policy, model, "varlen", device)
    return LayoutTrial(str(device), dtype, *_measure_differences(varlen, padded), limits)


_Outcome = tuple[torch.Tensor, torch.Tensor]


def _measure_differences(one: _Outcome, other: _Outcome) -> tuple[float, float]:
    relative = (one[1] - other[1]).norm() / other[1].norm()
    return float((one[0] - other[0]).abs().max()), float(relative)


def _run(policy: PolicyModel, model: PreTrainedModel, layout: Layout, device: torch.device) -> _Outcome:
    """Compute [N] log-probabilities of the trained tokens and all gradients of their sum, in float32 on the CPU."""
    rng, vocabulary = np.random.default_rng(0), model.config.get_text_config().vocab_size
    prefix, *others = (rng.integers(0, vocabulary, n) for n in (6, 5, 40, 17, 90))
    rows = [*(np.concatenate([prefix, each]) for each in others[:2]), *others[2:]]
    samples = Samples.from_tokens(rows, [np.arange(len(row)) >= len(prefix) for row in rows])
    batch = Packer(TrainConfig(), layout, device).micro_batch(samples, list(range(len(rows))), [""])
    model.zero_grad()
    logprobs, _ = policy.values(model, batch, entropy_gradient=False)
    logprobs.sum().backward()
    gradient = [each.grad.float().flatten().cpu() for each in model.parameters() if each.grad is not None]
    in_order = torch.cat([logprobs.detach()[batch.rows == row] for row in range(len(rows))])
    return in_order.float().cpu(), torch.cat(gradient)
