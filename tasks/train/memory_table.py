"""The plan of memory for models from 0.5 to 70 billion parameters: `python -m tasks.train.memory_table`."""

import sys
from collections.abc import Iterator

from tasks.train.config import LoraConfig, TrainConfig
from tasks.train.memory_plan import GIB, ModelSizes, plan_memory

MODELS = {
    "Qwen2.5-0.5B": ModelSizes(896, 24, 4864, 896, 128, 151_936, is_tied=True),
    "Qwen2.5-1.5B": ModelSizes(1536, 28, 8960, 1536, 256, 151_936, is_tied=True),
    "Qwen2.5-3B": ModelSizes(2048, 36, 11_008, 2048, 256, 151_936, is_tied=True),
    "Qwen2.5-7B": ModelSizes(3584, 28, 18_944, 3584, 512, 152_064, is_tied=False),
    "Qwen2.5-14B": ModelSizes(5120, 48, 13_824, 5120, 1024, 152_064, is_tied=False),
    "Qwen3-30B-A3B": ModelSizes(
        2048, 48, 768, 4096, 512, 151_936, is_tied=False, experts=128, experts_a_token=8
    ),
    "Qwen2.5-32B": ModelSizes(5120, 64, 27_648, 5120, 1024, 152_064, is_tied=False),
    "Llama-3.1-70B": ModelSizes(8192, 80, 28_672, 8192, 1024, 128_256, is_tied=False),
}
_BF16 = TrainConfig(dtype="bfloat16", gradient_checkpointing=True)
_LORA = LoraConfig(rank=16)
SETUPS = {
    "float32, 1 rank": TrainConfig(),
    "1 rank": _BF16,
    "1 rank, offload optimizer": _BF16.model_copy(update={"offload": "optimizer", "zero_stage": 2}),
    "8 ranks, ZeRO 2": _BF16.model_copy(update={"ranks": 8, "zero_stage": 2}),
    "8 ranks, ZeRO 3": _BF16.model_copy(update={"ranks": 8, "zero_stage": 3}),
    "64 ranks, ZeRO 3": _BF16.model_copy(update={"ranks": 64, "zero_stage": 3}),
    "1 rank, LoRA": _BF16.model_copy(update={"lora": _LORA}),
    "8 ranks, LoRA, ZeRO 3": _BF16.model_copy(update={"lora": _LORA, "ranks": 8, "zero_stage": 3}),
}


def table() -> Iterator[str]:
    """Lines of Markdown: GiB of one rank's device, by model and setup."""
    yield f"| model | parameters | {' | '.join(SETUPS)} |"
    yield f"|---|---:|{'---:|' * len(SETUPS)}"
    for name, sizes in MODELS.items():
        cells = [f"{plan_memory(sizes, config).total / GIB:.1f}" for config in SETUPS.values()]
        yield f"| {name} | {sizes.parameters / 1e9:.2f} G | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
