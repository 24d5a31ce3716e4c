"""Run by the trainer's launcher: a step with adapters under every ZeRO stage: the reference's log-probabilities and gradients before it,
whole weights after, by rank 0.

JOB.json: {"model", "folder", "output", "lora", "cases": [{"name", "zero_stage", "dtype"}]}
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file

from rollmill.tasks.train.batch_training import UpdateLoop
from rollmill.tasks.train.checkpoints.hf_export import gather_weights
from rollmill.tasks.train.config import KLConfig, LoraConfig, TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Update
from rollmill.tasks.train.engine.lora import add_adapters
from rollmill.tasks.train.engine.policy_model import load_policy
from rollmill.tasks.train.engine.reference_policy import BaseModelPolicy, load_reference
from rollmill.tasks.train.objective.objective import Objective
from rollmill.tasks.train.policy_logprobs import compute_row_logprobs, gather_rows
from rollmill.tasks.train.samples import read_samples
from rollmill.tasks.train.service.ranks import join_ranks


class RecordingEngine(Engine):
    """Keeps the gradient that an update is about to apply."""

    gradient: dict[str, torch.Tensor]

    def update(self, lr: float) -> Update:
        trained = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        self.gradient = {name: safe_get_full_grad(each).clone() for name, each in trained}
        return super().update(lr)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    ranks = join_ranks(120.0)
    _, samples = read_samples(job["folder"], 0)
    for case in job["cases"]:
        config = TrainConfig(
            ranks=ranks.world_size,
            zero_stage=case["zero_stage"],
            dtype=case["dtype"],
            micro_batch_tokens=700,
            max_grad_norm=0.0,
            warmup_steps=0,
            lora=LoraConfig(**job["lora"]),
        )
        model = load_policy(job["model"], config.dtype)
        add_adapters(model, config.lora)
        generator = torch.Generator().manual_seed(1)
        for name, each in model.named_parameters():
            if ".lora_B." in name:  # which begin as zero, and leave A without a gradient
                each.data.copy_(torch.randn(each.shape, generator=generator) * 0.1)
        engine = RecordingEngine(config, model, ranks.device)
        frozen = config.model_copy(update={"kl": KLConfig(reference="frozen")})
        reference = load_reference(frozen, engine, job["model"])
        assert isinstance(reference, BaseModelPolicy), "the start model is not loaded again"
        (rows,) = samples.split(1)
        plan = reference.packer.plan(samples, rows, ranks.world_size)[ranks.rank]
        said = gather_rows(compute_row_logprobs(reference, samples, plan))
        training = UpdateLoop(config, engine, samples, 0, Objective(config))
        training.run()
        assert not training.reason
        weights = {name: each.clone() for name, each in gather_weights(engine.model)}
        if ranks.rank == 0:
            stored = {samples.trajectory_ids[row]: each for row, each in said.items()}
            np.savez(Path(job["output"]) / f"{case['name']}.reference.npz", **stored)
            for kind, tensors in (("gradient", engine.gradient), ("weights", weights)):
                save_file(tensors, Path(job["output"]) / f"{case['name']}.{kind}.safetensors")
        engine.close()
    dist.barrier()  # a rank that leaves while the other is at work may abort at its end
    dist.destroy_process_group()


main()
