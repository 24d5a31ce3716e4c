"""Run by torchrun: the gradient of one stored batch, for every case of JOB.json, written by rank 0.

JOB.json: {"model", "folder", "output", "cases": [{"name", "zero_stage", "micro_batch_tokens", "rank_by_rank", "settings"}]}
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file

from tasks.train.config import TrainConfig
from tasks.train.engine import Engine, Update
from tasks.train.objective import Objective
from tasks.train.process_group import join_ranks
from tasks.train.samples import read_samples
from tasks.train.step import StepTraining


class RecordingEngine(Engine):
    """Keeps the gradient that an update is about to apply."""

    gradient: dict[str, torch.Tensor]

    def update(self, lr: float) -> Update:
        self.gradient = {
            name: safe_get_full_grad(each).clone() for name, each in self.model.named_parameters()
        }
        return super().update(lr)


class RankByRank(StepTraining):
    """The wrong way: each rank divides by its own tokens, and the ranks' gradients are averaged."""

    def _update(self, plan: list[list[int]], denominator: int, *, epoch: int, number: int) -> bool:
        own = sum(int(self._samples.loss_masks[row].sum()) for rows in plan for row in rows)
        return super()._update(plan, own * dist.get_world_size(), epoch=epoch, number=number)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    ranks = join_ranks(120.0)
    _, samples = read_samples(job["folder"], 0)
    for case in job["cases"]:
        config = TrainConfig(
            ranks=ranks.world_size,
            zero_stage=case["zero_stage"],
            micro_batch_tokens=case["micro_batch_tokens"],
            max_grad_norm=0.0,
            **case["settings"],
        )
        engine = RecordingEngine.load(config, job["model"], ranks.device)
        kind = RankByRank if case["rank_by_rank"] else StepTraining
        training = kind(config, engine, samples, 0, Objective(config))
        training.run()
        assert not training.reason
        if ranks.rank == 0:
            save_file(engine.gradient, Path(job["output"]) / f"{case['name']}.safetensors")
        engine.close()
    dist.destroy_process_group()


main()
