"""Run by the trainer's launcher: an update whose gradient is not finite on one rank, for every case of JOB.json.

JOB.json: {"model", "output", "skipped", "cases": [{"name", "zero_stage", "dtype"}]}. Rank 0 writes {name: facts} to output.
Last, under the name "skipped", a step whose loss is not finite on one rank.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from rollmill.tasks.train.batch_training import UpdateLoop
from rollmill.tasks.train.checkpoints.hf_export import gather_weights
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Update
from rollmill.tasks.train.objective.objective import Objective
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.service.ranks import Ranks, join_ranks


def update(engine: Engine, ranks: Ranks, factor: float) -> Update:
    """Two micro-batches of the same rows; the last rank's second one has its loss multiplied by `factor`."""
    token_ids = np.arange(2, 20).reshape(2, 9)
    masks = np.isin(np.arange(18).reshape(2, 9), (4, 5, 13))
    batch = engine.packer.micro_batch(Samples.from_tokens(list(token_ids), list(masks)), [0, 1], [""])
    for is_last in (False, True):
        logprobs = engine.forward(batch).logprobs
        is_hit = is_last and ranks.rank == ranks.world_size - 1
        engine.backward(-logprobs.sum() * (factor if is_hit else 1.0), is_last=is_last)
    return engine.update(1e-2)


def state(engine: Engine) -> list[torch.Tensor]:
    """Every weight, master weight and moment, and the number of updates the optimizer counts."""
    whole = [each.clone() for _, each in gather_weights(engine.model)]
    optimizer = engine._engine.optimizer
    if hasattr(optimizer, "dp_process_group") or hasattr(optimizer, "real_dp_process_group"):
        for parameter in engine.model.parameters():
            whole.append(safe_get_full_fp32_param(parameter).clone())
            whole += [
                safe_get_full_optimizer_state(parameter, key).clone() for key in ("exp_avg", "exp_avg_sq")
            ]
    basic = getattr(optimizer, "optimizer", optimizer)
    whole += [
        each.clone() for moments in basic.state.values() for each in moments.values() if torch.is_tensor(each)
    ]
    return whole


def is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    same = len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, same)
    return all(answers)


def facts(job: dict[str, str], case: dict[str, object], ranks: Ranks) -> dict[str, object]:
    config = TrainConfig(ranks=ranks.world_size, zero_stage=case["zero_stage"], dtype=case["dtype"])
    hit, spared = (Engine.load(config, job["model"], ranks.device) for _ in range(2))
    update(hit, ranks, 1.0)
    update(spared, ranks, 1.0)
    before = state(hit)
    skipped = [update(hit, ranks, factor).updated for factor in (float("nan"), float("inf"))]
    is_untouched = is_same(state(hit), before)
    applied = update(hit, ranks, 1.0).updated
    update(spared, ranks, 1.0)
    found = {
        "n_tensors": len(before),
        "applied_non_finite": any(skipped),
        "is_untouched": is_untouched,
        "applied_afterwards": applied,
        "changed_afterwards": not is_same(state(hit), before),
        "as_if_nothing_had_been": is_same(state(hit), state(spared)),
    }
    hit.close()
    spared.close()
    return found


def skipped(job: dict[str, str], ranks: Ranks) -> dict[str, object]:
    """A step whose loss is not finite on the last rank, though its gradient is."""
    config = TrainConfig(ranks=ranks.world_size, loss="planted_losses:not_a_number")
    engine = Engine.load(config, job["model"], ranks.device)
    before = state(engine)
    samples = replace(
        Samples.from_tokens([np.arange(2, 11)] * 4, [np.arange(9) > 4] * 4),
        advantages=np.array([1.0, -1.0] * 2),
    )
    training = UpdateLoop(config, engine, samples, 0, Objective(config))
    training.run()
    is_untouched = is_same(state(engine), before)
    engine.close()
    return {"reason": training.reason, "n_updates": training.n_updates, "is_untouched": is_untouched}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    ranks = join_ranks(120.0)
    found = {case["name"]: facts(job, case, ranks) for case in job["cases"]}
    found[job["skipped"]] = skipped(job, ranks)
    if ranks.rank == 0:
        Path(job["output"]).write_text(json.dumps(found))
    dist.barrier()  # a rank that leaves while the other is at work may abort at its end
    dist.destroy_process_group()


main()
