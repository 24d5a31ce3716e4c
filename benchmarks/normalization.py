"""Does the gradient depend on how a batch is split? Ranks 1, 2 and 4, four ways each, against double precision.

24 rows of 1 to 512 trained tokens, through the product's engine and step with DeepSpeed on real ranks.
`max_relative_difference` is the norm of a tensor's difference to a double-precision reference over the norm of that, the
worst tensor of all splits; the reference takes one row at a time through plain PyTorch. `split_difference` is the same of the
whole gradient between two splits, the worst pair. For comparison, what averaging by rank
would make of 4 ranks, in double precision.
"""

import argparse
import json
import os
import subprocess
import tempfile
from itertools import combinations
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.trainer.splits import TEMPERATURE, VOCABULARY, uneven_samples
from rollmill.tasks.train.packing.packing_plan import TokenBudget, pack_padded
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.service.launch import launch_command

RANKS, TIMEOUT_S = (1, 2, 4), 600.0
WHOLE = 1 << 40
"""Tokens of a budget that everything fits into."""
TARGETS = {"max_relative_difference": 1e-5, "split_difference": 1e-6}
Gradient = dict[str, torch.Tensor]


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def references(model: Path, samples: Samples) -> tuple[Gradient, Gradient]:
    """In double precision, one row at a time: over all trained tokens, and by each of 4 ranks' tokens, averaged."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    n_ranks = RANKS[-1]
    (shares,) = zip(
        *pack_padded([len(row) for row in samples.token_ids], n_ranks, TokenBudget(WHOLE, WHOLE)), strict=True
    )
    counts = [sum(int(samples.loss_masks[row].sum()) for row in share) for share in shares]
    weights = {row: 1.0 / (n_ranks * n) for share, n in zip(shares, counts, strict=True) for row in share}
    found: list[Gradient] = []
    for scale in (dict.fromkeys(weights, 1.0 / sum(counts)), weights):
        for row, weight in scale.items():
            (row_loss(policy, samples, row) * weight).backward()
        found.append(copy_gradient(policy))
        policy.zero_grad()
    return found[0], found[1]


def copy_gradient(policy: PreTrainedModel) -> Gradient:
    """Return a copy of every parameter's gradient."""
    found: Gradient = {}
    for name, each in policy.named_parameters():
        assert each.grad is not None, name
        found[name] = each.grad.clone()
    return found


def row_loss(policy: PreTrainedModel, samples: Samples, row: int) -> torch.Tensor:
    """Sum over a row's trained tokens of -advantage times log-probability."""
    ids = torch.tensor(samples.token_ids[row], dtype=torch.int64)
    log_p = torch.log_softmax(policy(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, dim=1)
    chosen = log_p.gather(1, ids[1:, None])[:, 0]
    trained = torch.from_numpy(samples.loss_masks[row][1:])
    return -float(samples.advantages[row]) * chosen[trained].sum()


def split_gradients(model: Path, output: Path) -> dict[str, Gradient]:
    """The gradients of all splits by what they are."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    for n_ranks in RANKS:
        words = [*launch_command(n_ranks), "-m", "benchmarks.trainer.splits", str(model), str(output)]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{n_ranks} ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return {path.stem: load_file(path) for path in sorted(output.glob("*.safetensors"))}


def worst_tensor(found: Gradient, reference: Gradient) -> float:
    """Largest norm of a tensor's difference, to the norm of the tensor."""
    return max(float((found[name] - each).norm() / each.norm()) for name, each in reference.items())


def whole(gradient: Gradient) -> torch.Tensor:
    return torch.cat([gradient[name].flatten().double() for name in sorted(gradient)])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        model, output = Path(place) / "model", Path(place) / "gradients"
        output.mkdir()
        make_model(model)
        exact, by_rank = references(model, uneven_samples())
        found = split_gradients(model, output)
    differences = {split: worst_tensor(each, exact) for split, each in found.items()}
    lines = [whole(each) for each in found.values()]
    for split, value in differences.items():
        print(f"{split:32}{value:10.1e}")
    figures = {
        "max_relative_difference": max(differences.values()),
        "split_difference": max(float((a - b).norm() / a.norm()) for a, b in combinations(lines, 2)),
    }
    for name, target in TARGETS.items():
        reached = "reached" if figures[name] <= target else "MISSED"
        print(f"{name}: {figures[name]:.1e}, target {target:g}: {reached}")
    averaged = worst_tensor(by_rank, exact)
    print(f"averaged by rank, 4 ranks: {averaged:.2f}")
    print(
        json.dumps(
            {"benchmark": "normalization"} | figures | {"averaged_by_rank": averaged, "splits": differences}
        )
    )


if __name__ == "__main__":
    main()
