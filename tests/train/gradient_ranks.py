"""Run by torchrun: the gradient of one stored batch, split in drawn ways, written by rank 0 with the way beside it.

JOB.json: {"model", "folder", "output", "n_cases", "objectives": {name: settings}}. Every rank draws the same cases,
since nothing of them is random.
"""

import json
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from hypothesis import Phase, given, settings
from safetensors.torch import save_file

from tasks.train.config import TrainConfig
from tasks.train.engine import Engine, Update
from tasks.train.objective import Objective
from tasks.train.process_group import Ranks, join_ranks
from tasks.train.samples import Samples, read_samples
from tasks.train.step import StepTraining

WAYS = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(["token", "sequence", "fixed_length", "gspo", "epochs"]),
        "zero_stage": st.integers(0, 3),
        "layout": st.sampled_from(["padded", "varlen"]),
        "micro_batch_tokens": st.sampled_from([120, 300, 700, 10_000]),
        "micro_batch_overhead_tokens": st.sampled_from([0, 64]),
        "head_chunk_mib": st.sampled_from([1, 512]),
        "gradient_checkpointing": st.booleans(),
    }
)


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


def reordered(samples: Samples, order: list[int]) -> Samples:
    """The batch with its rows in another order."""
    return Samples(
        trajectory_ids=[samples.trajectory_ids[row] for row in order],
        envs=[samples.envs[row] for row in order],
        temperatures=samples.temperatures[order],
        advantages=samples.advantages[order],
        token_ids=[samples.token_ids[row] for row in order],
        loss_masks=[samples.loss_masks[row] for row in order],
        logprobs=[samples.logprobs[row] for row in order],
    )


def gradient(
    job: dict[str, Any], ranks: Ranks, samples: Samples, way: dict[str, object], kind: type[StepTraining]
) -> dict[str, torch.Tensor]:
    split = {name: value for name, value in way.items() if name != "objective"}
    objective = job["objectives"][way["objective"]]
    config = TrainConfig(ranks=ranks.world_size, max_grad_norm=0.0, **split, **objective)
    engine = RecordingEngine.load(config, job["model"], ranks.device)
    training = kind(config, engine, samples, 0, Objective(config))
    training.run()
    assert not training.reason
    engine.close()
    return engine.gradient


def drawn_cases(n_cases: int, n_rows: int) -> list[tuple[dict[str, object], list[int]]]:
    """Ways to split the batch, each with an order of its rows; the same on every rank.

    Where a batch makes several updates, the order says of which update a row is, and stays.
    """
    cases = []

    @settings(max_examples=n_cases, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(WAYS, st.permutations(range(n_rows)))
    def draw(way: dict[str, object], order: list[int]) -> None:
        is_one_update = way["objective"] != "epochs"
        cases.append((way, order if is_one_update else list(range(n_rows))))

    draw()
    return cases


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    ranks = join_ranks(120.0)
    _, samples = read_samples(job["folder"], 0)
    cases = drawn_cases(job["n_cases"], len(samples.envs))
    found = {
        str(number): gradient(job, ranks, reordered(samples, order), way, StepTraining)
        for number, (way, order) in enumerate(cases)
    }
    wrong = {"objective": "token", "zero_stage": 0, "micro_batch_tokens": 700}
    found["rank-by-rank"] = gradient(job, ranks, samples, wrong, RankByRank)
    if ranks.rank == 0:
        for name, each in found.items():
            save_file(each, Path(job["output"]) / f"{name}.safetensors")
        (Path(job["output"]) / "cases.json").write_text(json.dumps([way for way, _ in cases]))
    dist.destroy_process_group()


main()
