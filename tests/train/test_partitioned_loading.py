"""Under ZeRO-3 a model is read a decoder layer at a time; it is the model that is read whole, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
}


@pytest.mark.slow
def test_a_model_loaded_by_shards_equals_the_whole_one_divided(
    tmp_path: Path, run_ranks: Callable[[str, int, dict[str, object]], None]
) -> None:
    folders = []
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        # Small files: layers are spread over several of them.
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name, max_shard_size="40KB")
        assert len([*(tmp_path / name).glob("*.safetensors")]) > 1
        folders.append(str(tmp_path / name))
    run_ranks("partition_ranks.py", 2, {"models": folders, "dtypes": ["float32", "bfloat16"]})


@pytest.mark.slow
def test_a_closed_policy_under_zero_3_is_freed(
    tmp_path: Path, run_ranks: Callable[[str, int, dict[str, object]], None]
) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["untied"]).save_pretrained(tmp_path / "model")
    run_ranks("closing_ranks.py", 1, {"model": str(tmp_path / "model")})
