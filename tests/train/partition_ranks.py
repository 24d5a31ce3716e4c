"""Run by the trainer's launcher: models loaded by parts under ZeRO-3, compared with the same models loaded whole.

JOB.json: {"models": [folder], "dtypes": [dtype]}
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.partitioned_loading import load_trained
from rollmill.tasks.train.engine.policy_model import load_policy
from rollmill.tasks.train.engine.private_deepspeed import is_sharded
from rollmill.tasks.train.service.ranks import join_ranks


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    ranks = join_ranks(120.0)
    for folder in job["models"]:
        for dtype in job["dtypes"]:
            config = TrainConfig(ranks=ranks.world_size, zero_stage=3, dtype=dtype)
            compare(load_trained(config, folder), load_policy(folder, dtype))
    dist.barrier()
    dist.destroy_process_group()


def compare(divided: torch.nn.Module, whole: torch.nn.Module) -> None:
    """Each rank has a part of every parameter; together they are the whole model's, and buffers are the same."""
    ours, theirs = (dict(each.named_parameters()) for each in (divided, whole))
    assert [*ours] == [*theirs]
    for name, each in ours.items():
        assert is_sharded(each), name
        with deepspeed.zero.GatheredParameters([each]):
            assert each.dtype == theirs[name].dtype, name
            assert torch.equal(each, theirs[name]), name
    for name, each in divided.named_buffers():
        assert torch.equal(each, dict(whole.named_buffers())[name]), name
    assert type(divided) is type(whole)


main()
