"""Routing replay: the router takes the stored experts, with the model's own weights; and which models can do it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rollmill.tasks.errors import BatchRefusedError, ConfigError, ShardError
from rollmill.tasks.store.expert_routing import make_routing_row
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import check_model
from rollmill.tasks.train.engine.routing_replay import NO_EXPERT, RoutingReplay, experts_at, find_routers
from rollmill.tasks.train.samples import Samples, read_samples

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
QWEN = SIZES | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 8}
MODELS = {
    "qwen3-moe": Qwen3MoeConfig(**QWEN, norm_topk_prob=True),
    "not normalized": Qwen3MoeConfig(**QWEN, norm_topk_prob=False),
    "a dense layer between": Qwen3MoeConfig(**QWEN, mlp_only_layers=[1]),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "olmoe": OlmoeConfig(**{**SIZES, "num_key_value_heads": 2}, **EXPERTS, num_experts=4),
    "gpt-oss": GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4),
}
TOKENS = torch.arange(2, 14)[None]


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for router in find_routers(model).values():
        torch.nn.init.normal_(router.weight)
    return model


def record_experts(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and [T, routers, k] the experts that its experts were given."""
    used: list[torch.Tensor] = []
    hooks = [
        each.register_forward_pre_hook(lambda _, inputs: used.append(inputs[1]))
        for name, each in model.named_modules()
        if name.endswith(".experts")
    ]
    logits = model(input_ids=TOKENS).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(used, 1)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_own_choice_replayed_changes_nothing_and_another_is_used_at_every_token_and_layer(
    config: PreTrainedConfig,
) -> None:
    plain = model_of(config)
    replayed = copy.deepcopy(plain)
    replay = RoutingReplay(replayed)
    logits, own = record_experts(plain)
    for experts in (None, own.to(torch.int16), own.flip(-1).to(torch.int16)):
        replay.experts = experts
        torch.testing.assert_close(record_experts(replayed)[0], logits, atol=1e-5, rtol=0)
    replay.experts = ((own + 1) % 4).to(torch.int16)
    replay.experts[3] = NO_EXPERT
    others, used = record_experts(replayed)
    rows = torch.arange(len(used)) != 3
    assert torch.equal(used[rows], replay.experts[rows].long())
    assert not torch.allclose(others, logits, atol=1e-3)


def test_experts_stored_by_decoder_layer_are_those_of_its_router() -> None:
    model = model_of(MODELS["a dense layer between"])
    _, own = record_experts(model)
    by_layer = torch.zeros(len(own), 3, 2, dtype=torch.int16)
    by_layer[:, [0, 2]] = ((own + 1) % 4).to(torch.int16)
    replay = RoutingReplay(model)
    replay.experts = by_layer
    assert torch.equal(record_experts(model)[1], by_layer[:, [0, 2]].long())


def by_hand(router: Any, chosen: torch.Tensor) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A router's forward pass with the experts given: the formula of the paper."""

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
        exponentials = logits.exp()
        total = sum(exponentials[range(len(chosen)), expert] for expert in chosen.T)
        weights = [exponentials[range(len(chosen)), expert] / total for expert in chosen.T]
        return logits, torch.stack(weights, 1), chosen

    return forward


def test_every_weight_has_the_gradient_through_the_stored_experts() -> None:
    naive = model_of(MODELS["qwen3-moe"])
    model = copy.deepcopy(naive)
    stored = (record_experts(model)[1] + 1) % 4
    replay = RoutingReplay(model)
    replay.experts = stored.to(torch.int16)
    for place, router in enumerate(find_routers(naive).values()):
        router.forward = by_hand(router, stored[:, place])
    for each in (model, naive):
        record_experts(each)[0].log_softmax(-1)[0, :, 5].sum().backward()
    for (name, found), expected in zip(model.named_parameters(), naive.parameters(), strict=True):
        assert (found.grad - expected.grad).norm() / expected.grad.norm() < 1e-5, name
        assert expected.grad.norm() > 0, name


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_experts_are_at_the_positions_of_their_tokens(lengths: list[int], data: Any) -> None:
    order = data.draw(st.permutations(range(sum(lengths) + 2)))
    places = np.split(np.array(order[: sum(lengths)]), np.cumsum(lengths)[:-1])
    stored = [
        np.random.default_rng(row)
        .integers(0, 200, (data.draw(st.integers(0, length)), 3, 2))
        .astype(np.uint8)
        for row, length in enumerate(lengths)
    ]
    found = experts_at(stored, places, sum(lengths) + 2)
    assert found.shape == (sum(lengths) + 2, 3, 2)
    rest = {*range(sum(lengths) + 2)}
    for experts, place in zip(stored, places, strict=True):
        for token, expert in zip(place, experts, strict=False):
            np.testing.assert_array_equal(found[token], expert)
            rest.discard(int(token))
    assert all((found[each] == NO_EXPERT).all() for each in rest)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (np.zeros((5, 2, 2), np.uint8), "have 2 layers, 2 experts a token"),
        (np.zeros((5, 3, 1), np.uint8), "3 layers, 1 experts a token"),
        (np.full((5, 3, 2), 4, np.uint8), r"the last one number 4; the model has 3 layers, 2 of 4 experts"),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused_by_trajectory(
    stored: np.ndarray, message: str
) -> None:
    replay = RoutingReplay(model_of(MODELS["qwen3-moe"]))
    fitting = np.full((5, 3, 2), 3, np.uint8)
    replay.check([fitting, np.zeros((0, 3, 2), np.uint8)], ["a", "b"])
    with pytest.raises(BatchRefusedError, match=f"trajectory b: .*{message}"):
        replay.check([fitting, stored], ["a", "b"])


def test_a_model_without_experts_is_named_before_its_weights_are_read(tmp_path: Path) -> None:
    Qwen2Config(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.replay_routing = True: Qwen2ForCausalLM has no routers"):
        check_model(TrainConfig(replay_routing=True), str(tmp_path))
    MODELS["qwen3-moe"].save_pretrained(tmp_path)
    check_model(TrainConfig(replay_routing=True), str(tmp_path))


class OddTopKRouter(torch.nn.Module):
    """Weights the first expert twice."""

    top_k, num_experts = 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 16))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden @ self.weight.T
        values, chosen = logits.softmax(-1).topk(2)
        return logits, values * torch.tensor([2.0, 1.0]), chosen


def test_a_router_that_weights_in_an_unknown_way_is_refused_by_name() -> None:
    model = model_of(MODELS["qwen3-moe"])
    for layer in model.model.layers:
        layer.mlp.gate = OddTopKRouter()
    with pytest.raises(ConfigError, match="OddTopKRouter weights its experts in a way that is not known"):
        RoutingReplay(model)


def sample(model: PreTrainedModel, n_prompt: int, n_new: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[T] tokens that transformers samples with a cache, and [T - 1, layers, k] the experts it routed them to."""
    found: dict[str, list[torch.Tensor]] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda _, __, output: found.setdefault(name, []).append(output[2])

    hooks = [each.register_forward_hook(record(name)) for name, each in find_routers(model).items()]
    torch.manual_seed(seed)
    prompt = torch.randint(2, 57, (1, n_prompt))
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        max_new_tokens=n_new,
        min_new_tokens=n_new,
    )
    for hook in hooks:
        hook.remove()
    experts = torch.stack([torch.cat(found[name]) for name in find_routers(model)], 1)
    return tokens[0].numpy(), experts.numpy().astype(np.uint8)


def compute_replayed_gradient(folder: Path, samples: Samples) -> dict[str, torch.Tensor]:
    """One row at a time in double precision, routers written out by hand: PPO's clipped loss over the trained tokens."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    total, n_tokens = torch.zeros((), dtype=torch.float64), 0
    for row, mask in enumerate(samples.loss_masks):
        stored = torch.from_numpy(samples.routing[row].astype(np.int64))
        whole = torch.cat([stored, stored[-1:]])  # the last token's experts reach no logits that count
        for place, router in enumerate(find_routers(policy).values()):
            router.forward = by_hand(router, whole[:, place])
        ids = torch.from_numpy(samples.token_ids[row].astype(np.int64))
        log_p = policy(input_ids=ids[None]).logits[0].log_softmax(-1)
        for t in mask.nonzero()[0]:
            ratio = torch.exp(log_p[t - 1, ids[t]] - float(samples.logprobs[row][t]))
            advantage, config = float(samples.advantages[row]), TrainConfig()
            bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            total = total - torch.minimum(ratio * advantage, bounded * advantage)
            n_tokens += 1
    (total / n_tokens).backward()
    return {name: each.grad for name, each in policy.named_parameters()}


@pytest.mark.service
@pytest.mark.parametrize(
    ("n_ranks", "chosen"),
    [
        pytest.param(1, ("zero0-varlen", "checkpointing", "own-choice"), marks=pytest.mark.long),
        (2, ("zero0-padded", "zero3-varlen", "several-updates", "own-choice")),
        pytest.param(2, (), marks=pytest.mark.long, id="2-all"),
    ],
)
def test_a_step_uses_the_experts_stored_with_the_rollouts_at_every_token_and_layer(
    n_ranks: int,
    chosen: tuple[str, ...],
    batches: Any,
    run_ranks: Callable[[str, int, dict[str, object]], None],
    tmp_path: Path,
) -> None:
    sampler = model_of(
        Qwen3MoeConfig(**QWEN | {"vocab_size": 57, "eos_token_id": None, "norm_topk_prob": True})
    )
    lengths = [(3, 9), (12, 4), (5, 30), (20, 11), (5, 7), (8, 16)]
    drawn = [sample(sampler, *each, seed) for seed, each in enumerate(lengths)]
    rows = [batches.row(*each, advantage=(-1.0) ** row) for row, each in enumerate(lengths)]
    batches.write_step(tmp_path, 0, rows, token_ids=[tokens for tokens, _ in drawn])
    routing = [make_routing_row("r", 0, f"r-0-{row}", [experts]) for row, (_, experts) in enumerate(drawn)]
    batches.write_shard(tmp_path, "routing", 0, pa.concat_batches(routing))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in sampler.parameters():  # a later policy, whose routers choose otherwise
            each += torch.randn(each.shape, generator=generator) * 0.3 * each.std(unbiased=False)
    sampler.save_pretrained(tmp_path / "model")

    small = {"micro_batch_tokens": 60, "replay_routing": True}
    cases = [
        {
            "name": f"zero{stage}-{layout}",
            "replays": True,
            "config": small | {"zero_stage": stage, "layout": layout},
        }
        for stage, layout in (
            (0, "padded"),
            (0, "varlen"),
            (1, "auto"),
            (2, "auto"),
            (3, "padded"),
            (3, "varlen"),
        )
    ]
    more = {"updates_per_step": 2, "epochs": 2, "gradient_checkpointing": True, "zero_stage": 3, "lr": 1e-2}
    cases += [
        {"name": "checkpointing", "replays": True, "config": small | {"gradient_checkpointing": True}},
        {"name": "several-updates", "replays": True, "config": small | more},
        {"name": "bfloat16", "replays": True, "config": small | {"dtype": "bfloat16", "zero_stage": 2}},
        {"name": "own-choice", "replays": False, "config": small | {"replay_routing": False}},
    ]
    cases = [case for case in cases if case["name"] in chosen or not chosen]
    output = tmp_path / "gradients"
    output.mkdir()
    job = {"model": str(tmp_path / "model"), "folder": str(tmp_path), "output": str(output), "cases": cases}
    run_ranks("routing_ranks.py", n_ranks, job)

    samples = read_samples(str(tmp_path), 0, with_routing=True)[1]
    expected = compute_replayed_gradient(tmp_path / "model", samples)
    exact = [file for file in output.iterdir() if file.stem not in ("several-updates", "bfloat16")]
    assert len(exact) >= 2
    for file in exact:
        gradient = load_file(file)
        assert gradient.keys() == expected.keys()
        for tensor, found in gradient.items():
            distance = (found - expected[tensor]).norm() / expected[tensor].norm()
            assert distance < 1e-5, (file.stem, tensor)


def test_routing_that_is_not_stored_any_more_names_the_settings(batches: Any, tmp_path: Path) -> None:
    batches.write_step(tmp_path, 0, batches.uneven_rows(3))
    with pytest.raises(
        ShardError, match=r"0 of 3 trajectories.*rollout\.keep_routing.*store\.keep_routing_steps"
    ):
        read_samples(str(tmp_path), 0, with_routing=True)
