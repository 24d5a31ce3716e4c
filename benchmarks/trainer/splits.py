"""The gradient of one batch on some ranks; run by the trainer's launcher: python -m benchmarks.trainer.splits MODEL OUTPUT.

Every rank makes the same very uneven rows. Rank 0 leaves the gradients of this number of ranks in OUTPUT, one file for each
way of splitting a rank's share.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file

from benchmarks.trainer.lengths import completion_lengths
from rollmill.tasks.train.batch_training import UpdateLoop
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Update
from rollmill.tasks.train.objective.objective import Objective
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.service.ranks import join_ranks

N_ROWS, N_PROMPT_TOKENS, VOCABULARY, TEMPERATURE = 24, 8, 1024, 0.8
WAYS: dict[str, dict[str, object]] = {
    "padded": {"layout": "padded", "micro_batch_tokens": 1200},
    "varlen": {"layout": "varlen", "micro_batch_tokens": 1200},
    "one row at a time": {"layout": "padded", "micro_batch_tokens": 1},
    "ZeRO-2": {"layout": "varlen", "zero_stage": 2},
}


class RecordingEngine(Engine):
    """Keeps the gradient that an update is about to apply."""

    gradient: dict[str, torch.Tensor]

    def update(self, lr: float) -> Update:
        """As of the engine."""
        named = self.model.named_parameters()
        self.gradient = {name: safe_get_full_grad(each).clone() for name, each in named}
        return super().update(lr)


def uneven_samples() -> Samples:
    """24 rows of which the longest has half a thousand tokens and the shortest a handful, prompts shared by 4 rows."""
    random = np.random.default_rng(0)
    lengths = sorted(completion_lengths(N_ROWS, 0))
    lengths[: N_ROWS // 3] = [1 + row for row in range(N_ROWS // 3)]
    prompts = random.integers(0, VOCABULARY, (N_ROWS // 4, N_PROMPT_TOKENS))
    token_ids = [
        np.concatenate([prompts[row // 4], random.integers(0, VOCABULARY, length)])
        for row, length in enumerate(lengths)
    ]
    masks = [np.arange(len(row)) >= N_PROMPT_TOKENS for row in token_ids]
    guesses = [random.normal(-np.log(VOCABULARY), 0.1, len(row)).astype(np.float32) for row in token_ids]
    return Samples(
        trajectory_ids=[str(row) for row in range(N_ROWS)],
        envs=["benchmark"] * N_ROWS,
        temperatures=np.full(N_ROWS, TEMPERATURE, np.float32),
        advantages=random.normal(size=N_ROWS).astype(np.float32),
        token_ids=token_ids,
        loss_masks=masks,
        logprobs=[np.where(mask, row, np.nan) for mask, row in zip(masks, guesses, strict=True)],
    )


def main() -> None:
    model, output = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    ranks, samples = join_ranks(120.0), uneven_samples()
    for way, settings in WAYS.items():
        config = TrainConfig.model_validate(
            {"ranks": ranks.world_size, "loss": "reinforce", "max_grad_norm": 0.0} | settings
        )
        engine = RecordingEngine.load(config, model, ranks.device)
        UpdateLoop(config, engine, samples, 0, Objective(config)).run()
        if ranks.rank == 0:
            save_file(engine.gradient, output / f"{ranks.world_size} ranks, {way}.safetensors")
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
