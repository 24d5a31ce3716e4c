"""Weights under the names, shapes and values of a Hugging Face checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rollmill.tasks.train.checkpoints.hf_export import export_policy, gather_weights
from rollmill.tasks.train.checkpoints.hf_layout import weight_layers

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        tie_word_embeddings=False,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_weights_have_the_names_and_values_of_a_saved_checkpoint(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "start")
    tokenizer_files = ("tokenizer.json", "additional_chat_templates/tool_use.jinja")
    (tmp_path / "start" / "additional_chat_templates").mkdir()
    for name in tokenizer_files:
        (tmp_path / "start" / name).write_text("{}")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    stored = load_file(tmp_path / "start" / "model.safetensors")
    export_policy(model, str(tmp_path / "exported"), is_writer=True)

    for found in (dict(gather_weights(model)), load_file(tmp_path / "exported" / "model.safetensors")):
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)
    assert [tuple(each) for layer in weight_layers(model) for each in layer.tensors] == [
        (name, tuple(each.shape), each.dtype) for name, each in gather_weights(model)
    ]
    assert ("lm_head.weight" in stored) == (not config.tie_word_embeddings)
    assert all((tmp_path / "exported" / name).is_file() for name in tokenizer_files)
    assert not any("experts.gate_up_proj" in name for name in stored)
