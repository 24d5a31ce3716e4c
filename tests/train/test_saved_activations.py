"""What autograd saves of a decoder layer through the CUDA kernel's branch, on meta tensors, against the memory plan.

Meta tensors have shapes and no memory, so that real sizes run on any machine. Not run on a GPU.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, SIZES
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.memory_plan import MODELS, ModelSizes, activation_items, plan_memory
from rollmill.tasks.train.engine.policy_model import DTYPES, PolicyModel
from rollmill.tasks.train.packing.layout import choose_layout
from rollmill.tasks.train.packing.packer import Packer
from rollmill.tasks.train.packing.varlen import ATTENTION
from rollmill.tasks.train.samples import Samples

META = torch.device("meta")
LENGTHS = (50, 400, 170, 380)
TOLERANCE = {"tiny": 0.03, "1.5B": 0.01}
"""Of the plan: indices, the kernel's sums and the experts' routers are not in it."""
WIDTHS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "moe_intermediate_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
}
# torch computes experts on meta tensors in bfloat16 alone; Gemma 2 is not for the kernel.
CASES = [
    (family, dtype)
    for family in FAMILIES
    for dtype in DTYPES
    if family != "gemma2" and (family, dtype) != ("qwen3-moe", "float32")
]


def config_of(family: str, width: str, n_layers: int) -> PretrainedConfig:
    sizes = {**SIZES, **FAMILIES[family].settings, **WIDTHS[width], "num_hidden_layers": n_layers}
    return AutoConfig.for_model(FAMILIES[family].model_type, **sizes)


def saved_bytes(config: PretrainedConfig, dtype: str) -> int:
    """Bytes that autograd saves in the forward pass of one micro-batch, weights apart; the backward pass runs too."""
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    model.set_attn_implementation(ATTENTION)
    settings = TrainConfig(dtype=dtype, gradient_checkpointing=False)
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, config.vocab_size, n) for n in LENGTHS]
    samples = Samples.from_tokens(rows, [np.arange(len(row)) >= 2 for row in rows])
    batch = Packer(settings, "varlen", META).micro_batch(samples, list(range(len(rows))), [""])
    weights = {each.untyped_storage()._cdata for each in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = PolicyModel(model, is_partitioned=False).values(model, batch, entropy_gradient=False)
    logprobs.sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    return sum(each.untyped_storage().nbytes() for place, each in saved.items() if place not in weights)


def bytes_a_layer(family: str, width: str, dtype: str) -> float:
    few, many = (saved_bytes(config_of(family, width, n_layers), dtype) for n_layers in (2, 4))
    return (many - few) / 2


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_a_layer_saves_what_the_memory_plan_counts(family: str, dtype: str, width: str) -> None:
    sizes = ModelSizes.of(json.loads(config_of(family, width, 2).to_json_string(use_diff=False)))
    planned = activation_items(sizes, dtype) * DTYPES[dtype].itemsize * sum(LENGTHS)
    assert bytes_a_layer(family, width, dtype) == pytest.approx(planned, rel=TOLERANCE[width])


def test_activations_in_the_plan_of_qwen_1_5b_are_those_of_all_its_layers() -> None:
    sizes = MODELS["Qwen2.5-1.5B"]
    settings = TrainConfig(dtype="bfloat16", gradient_checkpointing=False, micro_batch_tokens=sum(LENGTHS))
    measured = sizes.layers * bytes_a_layer("qwen2", "1.5B", "bfloat16")
    assert measured == pytest.approx(plan_memory(sizes, settings).activations, rel=TOLERANCE["1.5B"])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_are_packed_but_gemma_2_because_the_kernel_caps_no_scores(family: str) -> None:
    with META:
        model = AutoModelForCausalLM.from_config(config_of(family, "tiny", 2))
    assert choose_layout(model, TrainConfig(dtype="bfloat16"), META) == (
        "padded" if family == "gemma2" else "varlen"
    )
