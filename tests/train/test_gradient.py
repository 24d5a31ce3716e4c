"""The gradient of a very uneven batch, however it is split, against plain double precision."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from tasks.train.config import TrainConfig
from tasks.train.samples import Samples, read_samples

Gradient = dict[str, torch.Tensor]

OBJECTIVES: dict[str, dict[str, object]] = {
    "token": {},
    "sequence": {"normalization": "sequence"},
    "fixed_length": {"normalization": "fixed_length", "normalization_tokens": 90},
    "gspo": {"loss": "gspo", "normalization": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    "epochs": {"epochs": 2, "updates_per_step": 2, "lr": 1.0, "eps": 1.0, "warmup_steps": 0},
}
"""Settings of the objective by name; the first is the default. With so large an epsilon AdamW does not blow up rounding."""


def naive_gradient(model: Path, samples: Samples, config: TrainConfig) -> Gradient:
    """That of the last update: one row at a time, in double precision, the loss written out as in the papers."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, eps=config.eps, weight_decay=0.0)
    updates = config.epochs * samples.split(config.updates_per_step)
    for number, part in enumerate(updates):
        optimizer.zero_grad()
        rows = [naive_row(log_ratios(policy, samples, row), samples.advantages[row], config) for row in part]
        averaged(rows, config).backward()
        if number < len(updates) - 1:
            optimizer.step()
    return {name: each.grad for name, each in policy.named_parameters()}


def log_ratios(policy: Any, samples: Samples, row: int) -> torch.Tensor:
    """[T] of a row's trained tokens, against the sampler's log-probabilities."""
    ids = samples.token_ids[row]
    logits = policy(input_ids=torch.tensor(ids[None].astype("int64"))).logits[0]
    log_p = torch.log_softmax(logits / float(samples.temperatures[row]), dim=-1)
    trained = samples.loss_masks[row].nonzero()[0]
    return torch.stack([log_p[t - 1, int(ids[t])] - float(samples.logprobs[row][t]) for t in trained])


def naive_row(found: torch.Tensor, advantage: np.float32, config: TrainConfig) -> torch.Tensor:
    """[T] loss of a row's tokens with these log-ratios."""
    ratios = torch.exp(found)
    if config.loss == "gspo":
        ratios = torch.exp(found.mean()).expand(len(found))
    bounded = ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratios * float(advantage), bounded * float(advantage))


def averaged(rows: list[torch.Tensor], config: TrainConfig) -> torch.Tensor:
    if config.normalization == "token":
        return torch.cat(rows).mean()
    if config.normalization == "sequence":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / config.normalization_tokens for row in rows]).mean()


def distance(one: Gradient, other: Gradient) -> float:
    """Largest norm of a tensor's difference, to the norm of the tensor."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


def whole(gradient: Gradient) -> torch.Tensor:
    return torch.cat([gradient[name].flatten().double() for name in sorted(gradient)])


SIZES = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS = {
    "dense": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


@pytest.mark.service
@pytest.mark.parametrize(
    ("kind", "n_cases"),
    [
        ("dense", 8),
        pytest.param("tied", 24, marks=pytest.mark.long),
        pytest.param("experts", 24, marks=pytest.mark.long),
    ],
    ids=["dense", "tied", "experts"],
)
def test_gradient_does_not_depend_on_how_a_batch_is_split(
    kind: str,
    n_cases: int,
    batches: Any,
    run_ranks: Callable[[str, int, dict[str, object]], None],
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(model)
    batches.write_step(tmp_path, 0, batches.uneven_rows(24))
    found: dict[str, dict[str, Gradient]] = defaultdict(dict)
    for n_ranks in (1, 2, 4):
        output = tmp_path / f"ranks{n_ranks}"
        output.mkdir()
        job = {
            "model": str(model),
            "folder": str(tmp_path),
            "output": str(output),
            "n_cases": n_cases,
            "objectives": OBJECTIVES,
        }
        run_ranks("gradient_ranks.py", n_ranks, job)
        cases = json.loads((output / "cases.json").read_text())
        assert len(cases) == n_cases
        for number, case in enumerate(cases):
            gradient = load_file(output / f"{number}.safetensors")
            found[case["objective"]][f"{n_ranks} ranks: {case}"] = gradient
    samples = read_samples(str(tmp_path), 0)[1]
    references = {
        name: naive_gradient(model, samples, TrainConfig.model_validate(settings))
        for name, settings in OBJECTIVES.items()
    }

    for name, gradients in found.items():
        first = whole(next(iter(gradients.values())))
        for way, gradient in gradients.items():
            assert distance(gradient, references[name]) < 1e-5, way
            assert (whole(gradient) - first).norm() / first.norm() < 1e-6, way
    wrong = load_file(tmp_path / "ranks2" / "rank-by-rank.safetensors")
    for name, reference in references.items():
        assert distance(wrong, reference) > 1e-3, name
