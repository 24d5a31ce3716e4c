"""Trains a model of some 200 million parameters for two steps on a GPU, and compares peak memory with the plan: for `rollmill doctor`.

`python -m rollmill.tasks.train.engine.memory_trial SETTINGS.json` reads no setting, and prints a line of JSON for each of two steps,
with gradient checkpointing and without: MemoryTrial's fields.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.engine.memory_plan import ModelSizes, plan_memory
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.service.ranks import join_ranks

_TIMEOUT_S = 120.0
_ROW_TOKENS = 1024
_SIZES: Mapping[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True, slots=True)
class MemoryTrial:
    """Peak memory of a training step on a GPU, beside what the plan says.

    Attributes:
        gradient_checkpointing: setting of the step.
        peak_bytes: most that torch had allocated at once.
        planned_bytes: by the plan.
    """

    gradient_checkpointing: bool
    peak_bytes: int
    planned_bytes: int


def measure_step(config: TrainConfig, device: torch.device) -> MemoryTrial:
    """Train the model, with random weights, for two steps of two micro-batches and return the peak of a GPU's memory.

    The optimizer has its moments from the end of the first step on.
    """
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen2", **_SIZES), dtype=torch.bfloat16
        )
    engine = Engine(config, model, device)
    rng, n_rows = np.random.default_rng(0), config.micro_batch_tokens // _ROW_TOKENS
    rows = [rng.integers(0, _SIZES["vocab_size"], _ROW_TOKENS) for _ in range(n_rows)]
    samples = Samples.from_tokens(rows, [np.arange(_ROW_TOKENS) > 0] * n_rows)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        for is_last in (False, True):
            batch = engine.packer.micro_batch(samples, list(range(n_rows)), [""])
            engine.backward(-engine.forward(batch).logprobs.mean(), is_last=is_last)
        engine.update(1e-6)
    peak = torch.cuda.max_memory_allocated(device)
    engine.close()
    planned = plan_memory(ModelSizes.of(model.config.to_dict()), config).total
    return MemoryTrial(config.gradient_checkpointing, peak, round(planned))


def main() -> None:
    """Print the peak memory of a step with gradient checkpointing and of one without."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    ranks = join_ranks(_TIMEOUT_S)
    for checkpoints in (True, False):
        config = TrainConfig(
            dtype="bfloat16", gradient_checkpointing=checkpoints, micro_batch_tokens=8 * _ROW_TOKENS
        )
        sys.stdout.write(json.dumps(asdict(measure_step(config, ranks.device))) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
