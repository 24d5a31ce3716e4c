"""The plan of memory against models that are there."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rollmill.tasks.train.config import KLConfig, LoraConfig, TrainConfig
from rollmill.tasks.train.engine.lora import add_adapters
from rollmill.tasks.train.engine.memory_plan import (
    MODELS,
    ModelSizes,
    memory_table,
    plan_memory,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "lab" / "scale.md"
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
        Qwen3MoeConfig(**SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48),
        MixtralConfig(**SIZES, num_local_experts=4),
    ],
    ids=["tied", "wide heads", "experts", "local experts"],
)
def test_parameters_are_counted_up_to_biases_and_norms_of_heads(config: Qwen2Config) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = ModelSizes.of(json.loads(config.to_json_string(use_diff=False)))
    small = sum(
        each.numel()
        for name, each in model.named_parameters()
        if "bias" in name or "q_norm" in name or "k_norm" in name
    )
    assert sizes.parameters == sum(each.numel() for each in model.parameters()) - small
    add_adapters(model, LoraConfig(rank=3))
    adapters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert sizes.adapter_parameters(3) == adapters


def test_stages_and_adapters_leave_what_the_paper_says() -> None:
    sizes = MODELS["Qwen2.5-7B"]
    n = sizes.parameters
    plain = plan_memory(sizes, TrainConfig())
    assert (plain.weights, plain.gradients, plain.optimizer) == (4 * n, 4 * n, 8 * n)
    for stage, parts in ((1, (2, 6, 12 / 8)), (2, (2, 4 / 8, 12 / 8)), (3, (2 / 8, 4 / 8, 12 / 8))):
        plan = plan_memory(sizes, TrainConfig(dtype="bfloat16", zero_stage=stage, ranks=8))
        assert (plan.weights, plan.gradients, plan.optimizer) == pytest.approx([n * each for each in parts])
    lora = plan_memory(sizes, TrainConfig(dtype="bfloat16", zero_stage=1, lora=LoraConfig(rank=16)))
    assert lora.optimizer == 12 * sizes.adapter_parameters(16)
    away = plan_memory(sizes, TrainConfig(dtype="bfloat16", zero_stage=3, offload="optimizer_and_weights"))
    assert (away.weights, away.gradients, away.optimizer, away.host) == (0, 0, 0, 18 * n)


def test_a_frozen_reference_is_the_weights_again_but_not_those_that_adapters_are_added_to() -> None:
    sizes = MODELS["Qwen2.5-7B"]

    def reference(rank: int, model: str = "") -> float:
        config = TrainConfig(lora=LoraConfig(rank=rank), kl=KLConfig(reference="frozen", model=model))
        return plan_memory(sizes, config).reference

    assert reference(0) == reference(16, "another") == 4 * sizes.parameters
    assert reference(16) == 0


def test_the_documents_table_is_the_computed_one() -> None:
    assert "\n".join(memory_table()) in DOCUMENT.read_text()
