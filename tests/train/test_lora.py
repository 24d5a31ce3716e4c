"""Low-rank adapters: what is trained, what is merged, what is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.checkpoints.hf_export import export_policy, gather_weights
from rollmill.tasks.train.checkpoints.hf_layout import weight_layers
from rollmill.tasks.train.config import LoraConfig, TrainConfig
from rollmill.tasks.train.engine.lora import add_adapters
from rollmill.tasks.train.samples import Samples, read_samples
from rollmill.tasks.train.service.commands import (
    AwaitCheckpoint,
    BeginCheckpoint,
    DigestState,
    LoadPolicy,
    TrainStep,
)

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "dense": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
}
LORA = LoraConfig(rank=3, alpha=5.0)
TOKENS = torch.arange(12)[None]


@pytest.fixture(params=CONFIGS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "start"
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(folder)
    return folder


def adapted(folder: Path, config: LoraConfig = LORA, *, is_trained: bool = True) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_adapters(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, each in model.named_parameters():
        if is_trained and ".lora_" in name:
            each.data = torch.randn(each.shape, generator=generator) * 0.1
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


def test_version_0_is_the_start_model_and_the_same_at_every_start(start: Path) -> None:
    one, other = (adapted(start, is_trained=False) for _ in range(2))
    assert torch.equal(logits(one), logits(AutoModelForCausalLM.from_pretrained(start)))
    for (name, each), same in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(each, same), name
        assert each.requires_grad == (".lora_" in name)


def test_merged_weights_have_the_names_shapes_and_types_of_the_start_model(start: Path) -> None:
    model = adapted(start)
    weights, stored = dict(gather_weights(model)), load_file(start / "model.safetensors")
    described = {name: (tuple(each.shape), each.dtype) for name, each in weights.items()}
    assert described == {name: (tuple(each.shape), each.dtype) for name, each in stored.items()}
    assert described == {
        name: (shape, dtype) for layer in weight_layers(model) for name, shape, dtype in layer.tensors
    }


def test_an_export_is_the_merged_model_and_an_adapter_that_peft_reads(start: Path, tmp_path: Path) -> None:
    model = adapted(start)
    export_policy(model, str(tmp_path / "exported"), is_writer=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(model), logits(AutoModelForCausalLM.from_pretrained(start)), atol=1e-3)
    assert all(
        torch.equal(each, merged.state_dict()[name])
        for name, each in gather_weights(model)
        if name in merged.state_dict()
    )
    base = AutoModelForCausalLM.from_pretrained(start)
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "exported" / "adapter"))
    assert torch.equal(logits(read), logits(model))


@pytest.mark.parametrize("target", ["no_proj", "lm_head", "embed_tokens"])
def test_targets_that_cannot_have_adapters_are_named(start: Path, target: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.lora\.targets = '{target}': .*q_proj"):
        adapted(start, LoraConfig(rank=2, targets=("q_proj", target)))


def test_targets_may_be_ends_of_names(start: Path) -> None:
    model = adapted(start, LoraConfig(rank=2, targets=("0.self_attn.q_proj", "v_proj")))
    trained = {name.partition(".lora_")[0] for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {
        f"model.layers.{each}" for each in ("0.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.v_proj")
    }


def test_experts_and_routers_get_no_adapters(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["experts"]).save_pretrained(tmp_path)
    model = adapted(tmp_path)
    trained = {name.split(".")[3] for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {"self_attn"}


def naive_gradient(policy: torch.nn.Module, samples: Samples) -> dict[str, torch.Tensor]:
    """One row at a time, in the policy's precision: PPO's clipped loss, over the trained tokens of the batch."""
    total, n_tokens, config = torch.zeros((), dtype=torch.float64), 0, TrainConfig()
    for row, mask in enumerate(samples.loss_masks):
        logits = policy(input_ids=torch.tensor(samples.token_ids[row][None].astype("int64"))).logits[0]
        log_p = torch.log_softmax(logits / float(samples.temperatures[row]), dim=-1)
        for t in mask.nonzero()[0]:
            log_ratio = log_p[t - 1, int(samples.token_ids[row][t])] - float(samples.logprobs[row][t])
            ratio, advantage = log_ratio.exp(), float(samples.advantages[row])
            bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            total = total - torch.minimum(ratio * advantage, bounded * advantage)
            n_tokens += 1
    (total / n_tokens).backward()
    return {name: each.grad for name, each in policy.named_parameters() if each.requires_grad}


@torch.no_grad()
def naive_logprobs(policy: torch.nn.Module, samples: Samples) -> dict[str, np.ndarray]:
    """Of the trained tokens of each trajectory that has some, in the policy's precision."""
    found = {}
    for row, mask in enumerate(samples.loss_masks):
        ids = torch.tensor(samples.token_ids[row].astype("int64"))
        scaled = policy(input_ids=ids[None]).logits[0, :-1] / float(samples.temperatures[row])
        each = torch.log_softmax(scaled, -1).gather(1, ids[1:, None])[:, 0]
        if mask.any():
            found[samples.trajectory_ids[row]] = each[torch.tensor(mask[1:])].numpy()
    return found


@pytest.mark.service
@pytest.mark.parametrize("n_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_step_trains_adapters_alone_by_the_gradient_that_peft_has_and_their_start_model_is_the_reference(
    n_ranks: int,
    tiny_model: Path,
    batches: Any,
    run_ranks: Callable[[str, int, dict[str, object]], None],
    tmp_path: Path,
) -> None:
    batches.write_step(tmp_path, 0, batches.uneven_rows(16))
    cases = [{"name": f"zero{stage}", "zero_stage": stage, "dtype": "float32"} for stage in range(4)]
    cases += [{"name": "bfloat16", "zero_stage": 2, "dtype": "bfloat16"}]
    lora = {"rank": 4, "alpha": 8.0}
    job = {"model": str(tiny_model), "folder": str(tmp_path), "output": str(tmp_path), "lora": lora}
    run_ranks("lora_ranks.py", n_ranks, {**job, "cases": cases})

    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    start = {name: each.clone() for name, each in policy.state_dict().items()}
    samples = read_samples(str(tmp_path), 0)[1]
    reference = naive_logprobs(policy, samples)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = peft.get_peft_model(policy.float(), settings)
    generator = torch.Generator().manual_seed(1)
    for name, each in adapted.named_parameters():
        if ".lora_B." in name:
            each.data.copy_(torch.randn(each.shape, generator=generator) * 0.1)
    expected = naive_gradient(adapted.double(), samples)
    for stage in range(4):
        said = np.load(tmp_path / f"zero{stage}.reference.npz")
        assert set(said) == reference.keys()
        for name, each in reference.items():
            np.testing.assert_allclose(said[name][~np.isnan(said[name])], each, atol=1e-5)
        found = load_file(tmp_path / f"zero{stage}.gradient.safetensors")
        assert {f"base_model.model.{name}" for name in found} == expected.keys()
        for name, each in found.items():
            wanted = expected[f"base_model.model.{name}"]
            assert (each - wanted).norm() / wanted.norm() < 1e-5, (stage, name)
        after = load_file(tmp_path / f"zero{stage}.weights.safetensors")
        changed = {name for name, each in after.items() if not torch.equal(each, start[name].float())}
        assert changed == {name for name in start if "_proj.weight" in name}
    assert all(
        each.isfinite().all() for each in load_file(tmp_path / "bfloat16.weights.safetensors").values()
    )


@pytest.mark.service
async def test_a_checkpoint_holds_adapters_alone_and_gives_the_same_policy_again(
    tiny_model: Path, batches: Any, run_trainer: Callable[[TrainConfig], Any], tmp_path: Path
) -> None:
    digest = batches.write_step(tmp_path, 0, batches.uneven_rows(8))
    policy = {"run_id": "r", "model": str(tiny_model), "folder": str(tmp_path)}
    async with run_trainer(TrainConfig(ranks=2, zero_stage=3, lora=LORA)) as trainer:
        client = trainer.client
        await client.do(LoadPolicy(**policy, incarnation=1, checkpoint=None, version=0))
        await client.do(TrainStep(folder=str(tmp_path), run_id="r", step=0, digest=digest))
        await client.do(BeginCheckpoint(folder=str(tmp_path), version=1))
        await client.do(AwaitCheckpoint(version=1))
        before = await client.do(DigestState())
        checkpoint = tmp_path / "checkpoints" / "version=000001"
        await client.do(LoadPolicy(**policy, incarnation=2, checkpoint=str(checkpoint), version=1))
        assert await client.do(DigestState()) == before
    stored = {name for file in checkpoint.glob("*.safetensors") for name in load_file(file)}
    weights = {name for name in stored if name.startswith("weight/")}
    assert weights
    assert all(".lora_" in name for name in weights)
