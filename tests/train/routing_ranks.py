"""Run by the trainer's launcher: steps of a mixture of experts that replay stored routing, for every case of JOB.json.

Asserts that the experts were given the stored choice at every token and layer, in every forward pass and every one that
is made again for the backward pass. Rank 0 writes the gradient of the first update.

JOB.json: {"model", "folder", "output", "cases": [{"name", "replays", "config": TrainConfig}]}
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file

from rollmill.tasks.train.batch_training import UpdateLoop
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Forward, Update
from rollmill.tasks.train.objective.objective import Objective
from rollmill.tasks.train.packing.micro_batch import MicroBatch
from rollmill.tasks.train.samples import Samples, read_samples
from rollmill.tasks.train.service.ranks import join_ranks


class WatchedEngine(Engine):
    """Keeps what every layer's experts were given, and the first update's gradient."""

    samples: Samples
    gradient: dict[str, torch.Tensor] | None = None
    same, other, passes = 0, 0, 0

    def watch(self, samples: Samples) -> None:
        self.samples, self.expected = samples, np.empty(0)
        experts = [each for name, each in self.model.named_modules() if name.endswith(".experts")]
        for layer, module in enumerate(experts):
            module.register_forward_pre_hook(lambda _, inputs, layer=layer: self.compare(layer, inputs[1]))

    def compare(self, layer: int, given: torch.Tensor) -> None:
        self.passes += 1
        for place, stored in self.stored:
            agrees = (given[place[: len(stored)]].numpy() == stored[:, layer]).all(-1)
            self.same += int(agrees.sum())
            self.other += int((~agrees).sum())

    def forward(self, batch: MicroBatch, **options: Any) -> Forward:
        routing = self.samples.routing or []
        self.stored = [
            (place, routing[row].astype(np.int64))
            for row, place in zip(batch.row_numbers, batch.places, strict=True)
        ]
        return super().forward(batch, **options)

    def update(self, lr: float) -> Update:
        if self.gradient is None:
            self.gradient = {
                name: safe_get_full_grad(each).clone() for name, each in self.model.named_parameters()
            }
        return super().update(lr)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    ranks = join_ranks(120.0)
    for case in job["cases"]:
        config = TrainConfig(**case["config"], ranks=ranks.world_size, max_grad_norm=0.0)
        samples = read_samples(job["folder"], 0, with_routing=True)[1]
        engine = WatchedEngine.load(config, job["model"], ranks.device)
        engine.check_routing(samples)
        engine.watch(samples)
        training = UpdateLoop(config, engine, samples, 0, Objective(config))
        training.run()
        assert not training.reason
        assert engine.same > 0
        assert (engine.other == 0) == case["replays"], (case["name"], engine.same, engine.other)
        if ranks.rank == 0 and case["replays"]:
            assert engine.gradient is not None
            save_file(engine.gradient, Path(job["output"]) / f"{case['name']}.safetensors")
        engine.close()
    dist.barrier()  # a rank that leaves while the other is at work may abort at its end
    dist.destroy_process_group()


main()
