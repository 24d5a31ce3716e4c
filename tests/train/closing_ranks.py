"""Run by the trainer's launcher: policies under ZeRO-3, trained and frozen, are used and closed, and nothing keeps their weights.

JOB.json: {"model": folder}
"""

import gc
import json
import sys
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.engine.reference_policy import FrozenPolicy
from rollmill.tasks.train.policy_logprobs import compute_row_logprobs
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.service.ranks import join_ranks


def main() -> None:
    folder = json.loads(Path(sys.argv[1]).read_text())["model"]
    torch.set_num_threads(1)
    ranks = join_ranks(120.0)
    config = TrainConfig(ranks=1, zero_stage=3)
    for load in (Engine.load, FrozenPolicy):
        kept = use_and_close(config, load(config, folder, ranks.device))
        gc.collect()
        alive = [name for name, each in kept.items() if each() is not None]
        assert not alive, alive
    # The policy that stays is not touched: DeepSpeed's references are shared by all models.
    used, other = (Engine.load(config, folder, ranks.device) for _ in range(2))
    compute(config, used)
    other.close()
    compute(config, used)
    dist.destroy_process_group()


def use_and_close(
    config: TrainConfig, policy: Engine | FrozenPolicy
) -> dict[str, weakref.ReferenceType[torch.Tensor]]:
    """Compute with a policy and close it; returns its parameters, by name."""
    model = policy.model if isinstance(policy, Engine) else policy._model.module
    compute(config, policy)
    policy.close()
    return {name: weakref.ref(each) for name, each in model.named_parameters()}


def compute(config: TrainConfig, policy: Engine | FrozenPolicy) -> None:
    """Let DeepSpeed record which parameters the layers need, and then use what it recorded."""
    samples = Samples.from_tokens([np.array([1, 2, 3])], [np.array([False, True, True])])
    for _ in range(3):
        assert len(compute_row_logprobs(policy, samples, [[0]])[0]) == 3


main()
