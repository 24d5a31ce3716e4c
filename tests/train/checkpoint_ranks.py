"""Ranks that train, save and load states: `python checkpoint_ranks.py JOB.json`; see test_checkpoints.

JOB.json is {"model", "steps": [...]}; a step is {"config": TrainConfig, "load": folder or "", "updates": n, "save":
folder or "", "digests": path}: an engine is made, loads, trains, saves, and its tensors' digests are written.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.train.checkpoints.tensor_digests import tensor_digests
from rollmill.tasks.train.checkpoints.trainer_checkpoints import (
    Progress,
    begin_checkpoint,
    restore_checkpoint,
)
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.service.ranks import join_ranks


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    ranks = join_ranks(60.0)
    for step in job["steps"]:
        run(job["model"], step, ranks.device)
    dist.barrier()  # a rank that leaves while the other is at work may abort at its end
    dist.destroy_process_group()


def run(model: str, step: dict[str, Any], device: torch.device) -> None:
    config = TrainConfig.model_validate(step["config"])
    engine = Engine.load(config, model, device)
    if step["load"]:
        restore_checkpoint(engine, RunFolder(step["load"]).checkpoint(1), dist.get_rank())
    for number in range(step["first"], step["first"] + step["updates"]):
        update(engine, number)
    if step["save"]:
        writing = begin_checkpoint(engine, config, Progress("r", 1), RunFolder(step["save"]), 1)
        writing.write_own()
        dist.barrier()
    digests = tensor_digests(engine)
    if dist.get_rank() == 0:
        Path(step["digests"]).write_text(json.dumps(digests))
    engine.close()


def update(engine: Engine, number: int) -> None:
    """An update whose loss differs by rank and number."""
    tokens = np.array([2 + (number * 7 + dist.get_rank() * 3 + place) % 50 for place in range(12)])
    samples = Samples.from_tokens([tokens], [np.arange(12) > 0])
    forward = engine.forward(engine.packer.micro_batch(samples, [0], [""]))
    loss = -forward.logprobs.mean()
    engine.backward(loss, is_last=True)
    assert engine.update(1e-2).updated


if __name__ == "__main__":
    main()
