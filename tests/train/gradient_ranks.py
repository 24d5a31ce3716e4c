"""Run by the trainer's launcher: the gradient and the metrics of one stored batch, split in given ways, written by rank 0.

JOB.json: {"folder", "output", "shift_nats", "eps", "cases": [{"model", "order", "annotated", "rank_by_rank", "head_chunk_bytes",
"config"}]}. Of case n are n.safetensors, and in facts.json at place n the metrics and how many chunks each rank's largest micro-batch has.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file

from rollmill.tasks.observe.metrics import MetricTable
from rollmill.tasks.train.batch_training import Annotations, UpdateLoop
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine import deepspeed_engine
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Forward, Update
from rollmill.tasks.train.engine.policy_model import PolicyModel
from rollmill.tasks.train.objective.objective import Objective
from rollmill.tasks.train.packing.micro_batch import MicroBatch
from rollmill.tasks.train.samples import Samples, read_samples
from rollmill.tasks.train.service.ranks import Ranks, join_ranks


class RecordingEngine(Engine):
    """Keeps the gradient that an update is about to apply, and the most tokens that went through the head."""

    gradient: dict[str, torch.Tensor]
    most_trained = 0

    def forward(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> Forward:
        self.most_trained = max(self.most_trained, len(batch.positions))
        return super().forward(batch, entropy_gradient=entropy_gradient)

    def update(self, lr: float) -> Update:
        self.gradient = {
            name: safe_get_full_grad(each).clone() for name, each in self.model.named_parameters()
        }
        return super().update(lr)


class RankByRank(UpdateLoop):
    """The wrong way: each rank divides by its own tokens, and the ranks' gradients are averaged."""

    def _update(self, plan: list[list[int]], denominator: int, *, epoch: int, number: int) -> bool:
        own = sum(int(self._samples.loss_masks[row].sum()) for rows in plan for row in rows)
        return super()._update(plan, own * dist.get_world_size(), epoch=epoch, number=number)


def reorder(samples: Samples, order: list[int], shift_nats: float) -> Samples:
    """The batch with its rows in another order, and the sampler's log-probabilities shifted."""
    return replace(
        samples,
        trajectory_ids=[samples.trajectory_ids[row] for row in order],
        envs=[samples.envs[row] for row in order],
        temperatures=samples.temperatures[order],
        advantages=samples.advantages[order],
        token_ids=[samples.token_ids[row] for row in order],
        loss_masks=[samples.loss_masks[row] for row in order],
        logprobs=[samples.logprobs[row] + shift_nats for row in order],
        segments=[samples.row_segments(row) for row in order],
        token_advantages=[(samples.token_advantages or [])[row] for row in order],
    )


def compute_gradient(
    case: dict[str, Any], ranks: Ranks, samples: Samples
) -> tuple[dict[str, torch.Tensor], Any]:
    """Gradient and facts of a case; a collective."""
    deepspeed_engine.PolicyModel = partial(PolicyModel, chunk_bytes=case["head_chunk_bytes"])
    config = TrainConfig(ranks=ranks.world_size, max_grad_norm=0.0, **case["config"])
    engine = RecordingEngine.load(config, case["model"], ranks.device)
    kind = RankByRank if case["rank_by_rank"] else UpdateLoop
    annotations = Annotations(samples) if case["annotated"] else None
    training = kind(config, engine, samples, 0, Objective(config), annotations)
    training.run()
    assert not training.reason
    engine.close()
    most_trained = [0] * ranks.world_size
    dist.all_gather_object(most_trained, engine.most_trained)
    tables: list[MetricTable | None] = [None] * ranks.world_size
    dist.all_gather_object(tables, training.table)
    whole = MetricTable()
    whole.join(filter(None, tables))
    metrics = [(each.name, each.env, each.stat, each.value) for each in whole.metrics()]
    return engine.gradient, {"metrics": metrics, "most_trained": most_trained}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    deepspeed_engine.ADAMW_EPS = job["eps"]
    ranks = join_ranks(300.0)
    _, samples = read_samples(job["folder"], 0)
    facts = []
    for number, case in enumerate(job["cases"]):
        gradient, found = compute_gradient(case, ranks, reorder(samples, case["order"], job["shift_nats"]))
        facts.append(found)
        if ranks.rank == 0:
            save_file(gradient, Path(job["output"]) / f"{number}.safetensors")
    if ranks.rank == 0:
        (Path(job["output"]) / "facts.json").write_text(json.dumps(facts))
    dist.barrier()  # a rank that leaves while the other is at work may abort at its end
    dist.destroy_process_group()


main()
