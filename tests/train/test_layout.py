"""Both layouts against one row at a time, without DeepSpeed: what rows of a micro-batch have to do with each other."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    NemotronConfig,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.segments import LINEAR, Segment
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.memory_plan import HEAD_CHUNK_BYTES
from rollmill.tasks.train.engine.policy_model import PolicyModel
from rollmill.tasks.train.packing import layout as layout_module
from rollmill.tasks.train.packing import layout_trial
from rollmill.tasks.train.packing.layout import choose_layout
from rollmill.tasks.train.packing.layout_trial import compare_layouts, create_small_model
from rollmill.tasks.train.packing.packer import Packer
from rollmill.tasks.train.packing.varlen import varlen_attention
from rollmill.tasks.train.samples import Samples

V, CPU = 1024, torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "grouped heads": Qwen2Config(**SIZES),
    "sliding window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=0),
    "learned positions": GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=256),
}
BALANCED = Qwen3MoeConfig(
    **SIZES,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
CAPPED = Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0)


def model_of(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model.eval()


def rows_with_prompts(seed: int = 0) -> Samples:
    """Two groups of three rows that share a prompt, and three rows with a different prompt each."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, V, 40)] * 3 + [rng.integers(0, V, 12)] * 3
    prompts += [rng.integers(0, V, n) for n in (1, 5, 30)]
    completions = [rng.integers(0, V, n) for n in (30, 7, 7, 20, 1, 50, 60, 3, 3)]
    token_ids = [np.concatenate(both) for both in zip(prompts, completions, strict=True)]
    masks = [np.arange(len(ids)) >= len(prompt) for ids, prompt in zip(token_ids, prompts, strict=True)]
    return Samples.from_tokens(token_ids, masks)


def outcome(
    model: PreTrainedModel,
    samples: Samples,
    cuts: list[list[int]],
    config: TrainConfig,
    chunk_bytes: int = HEAD_CHUNK_BYTES,
    *,
    is_weighted: bool = True,
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities by row, and the gradient of a weighted sum of them and of the entropies; of the plain sum if not weighted."""
    packer = Packer(config, choose_layout(model, config, CPU), CPU)
    policy, found = PolicyModel(model, is_partitioned=False, chunk_bytes=chunk_bytes), {}
    model.zero_grad()
    for rows in cuts:
        batch = packer.micro_batch(samples, rows, [""])
        logprobs, entropies = policy.values(model, batch, entropy_gradient=True)
        weights = torch.cat([torch.linspace(-1, 2, int(samples.loss_masks[row].sum())) for row in rows])
        weights = weights if is_weighted else torch.ones_like(weights)
        (weights * logprobs + 0.3 * entropies).sum().backward()
        for place, row in enumerate(rows):
            found[row] = logprobs.detach()[batch.rows == place]
    return found, {name: each.grad.clone() for name, each in model.named_parameters()}


def distance(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / (other[name].norm() + 1e-9)) for name in other)


@pytest.mark.parametrize("layout", ["padded", "varlen"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_rows_have_the_log_probabilities_of_single_rows(kind: str, layout: Any) -> None:
    samples = rows_with_prompts()
    config = TrainConfig(layout=layout, micro_batch_tokens=300)
    alone = outcome(
        model_of(CONFIGS[kind]), samples, [[row] for row in range(9)], TrainConfig(layout="padded")
    )
    packer = Packer(config, layout, CPU)
    (cuts,) = packer.plan(samples, list(range(9)), 1)
    together = outcome(model_of(CONFIGS[kind]), samples, cuts, config)

    assert len(cuts) < 9
    assert distance(together[0], alone[0]) < 1e-5
    assert distance(together[1], alone[1]) < 1e-5


def branched_rows() -> tuple[Samples, Samples]:
    """Two groups of two rows that share a prompt, one of each with further segments; and every segment's whole sequence as a row."""
    rng, rows = np.random.default_rng(0), rows_with_prompts()
    ids, masks = ([values[row] for row in (1, 2, 3, 4)] for values in (rows.token_ids, rows.loss_masks))
    segments, whole_ids, whole_masks = [LINEAR] * 4, [], []
    for row in range(4):
        n, first = len(ids[row]), len(whole_ids)
        whole_ids.append(ids[row])
        whole_masks.append(masks[row])
        # Rewritten in its prompt, sampled again after that, continued before its end, and another conversation.
        further = [(0, 4, 6, 5), (1, 8, 0, 3), (0, n - 1, 2, 1), (-1, 0, 4, 2)] if row % 2 else []
        for parent, n_prefix, n_context, n_sampled in further:
            own, is_sampled = (
                rng.integers(0, V, n_context + n_sampled),
                [False] * n_context + [True] * n_sampled,
            )
            segments[row] = (*segments[row], Segment(len(ids[row]), parent, n_prefix, 0))
            ids[row], masks[row] = np.append(ids[row], own), np.append(masks[row], is_sampled)
            whole_ids.append(np.append(whole_ids[first + max(parent, 0)][:n_prefix], own))
            whole_masks.append(np.array([False] * n_prefix + is_sampled))
    samples = replace(Samples.from_tokens(ids, masks), segments=segments)
    return samples, Samples.from_tokens(whole_ids, whole_masks)


@pytest.mark.parametrize("layout", ["padded", "varlen"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_segments_have_the_log_probabilities_and_gradients_of_their_whole_sequences(
    kind: str, layout: Any
) -> None:
    (samples, whole), config = branched_rows(), TrainConfig(layout=layout, micro_batch_tokens=300)
    (cuts,) = Packer(config, layout, CPU).plan(samples, list(range(4)), 1)
    together = outcome(model_of(CONFIGS[kind]), samples, cuts, config, is_weighted=False)
    alone = outcome(
        model_of(CONFIGS[kind]),
        whole,
        [[row] for row in range(len(whole.token_ids))],
        TrainConfig(layout="padded"),
        is_weighted=False,
    )

    firsts = [0, *np.cumsum([len(samples.row_segments(row)) for row in range(4)]).tolist()]
    by_row = {row: torch.cat([alone[0][each] for each in range(*firsts[row : row + 2])]) for row in range(4)}
    assert distance(together[0], by_row) < 1e-5
    assert distance(together[1], alone[1]) < 1e-5


def test_what_segments_inherit_is_computed_once_in_packed_rows_and_for_each_in_padded_ones() -> None:
    # [a b c d] and, inheriting a, [a x y e]; [f g].
    ids, masks = [np.arange(7), np.arange(2)], [np.array([0, 0, 1, 1, 0, 0, 1], bool), np.array([0, 1], bool)]
    segments = [(LINEAR[0], Segment(4, 0, 1, 0)), LINEAR]
    samples = replace(Samples.from_tokens(ids, masks), segments=segments)
    packed, padded = (
        Packer(TrainConfig(), layout, CPU).micro_batch(samples, [0, 1], [""])
        for layout in ("varlen", "padded")
    )

    assert (packed.token_ids.numel(), packed.n_row_tokens) == (7 + 2, 4 + 4 + 2)
    assert (padded.token_ids.numel(), padded.n_row_tokens) == (3 * 4, 4 + 4 + 2)
    assert Packer(TrainConfig(), "varlen", CPU).micro_batch(samples, [], [""]).n_row_tokens == 0


@pytest.mark.parametrize("layout", ["padded", "varlen"])
def test_a_changed_row_changes_no_other_row(layout: Any) -> None:
    samples, config, kind = rows_with_prompts(), TrainConfig(layout=layout), CONFIGS["grouped heads"]
    before, _ = outcome(model_of(kind), samples, [list(range(9))], config)
    changed = samples.token_ids[4].copy()
    changed[-1] = (changed[-1] + 1) % V
    samples.token_ids[4] = changed
    after, _ = outcome(model_of(kind), samples, [list(range(9))], config)

    assert [row for row in range(9) if not torch.equal(before[row], after[row])] == [4]


def test_a_common_prompt_is_computed_once() -> None:
    samples = rows_with_prompts()
    packer = Packer(TrainConfig(), "varlen", CPU)

    batch = packer.micro_batch(samples, list(range(9)), [""])

    assert batch.token_ids.numel() == sum(len(each) for each in samples.token_ids) - 2 * 40 - 2 * 12


@pytest.mark.parametrize("layout", ["padded", "varlen"])
def test_the_head_in_chunks_equals_the_head_at_once(layout: Any) -> None:
    samples = rows_with_prompts()
    samples.token_ids.extend(rows_with_prompts(1).token_ids)
    samples.loss_masks.extend(rows_with_prompts(1).loss_masks)
    both = Samples.from_tokens(samples.token_ids, samples.loss_masks)
    cuts = [list(range(18))]
    whole = outcome(model_of(CONFIGS["grouped heads"]), both, cuts, TrainConfig(layout=layout))
    parts = outcome(model_of(CONFIGS["grouped heads"]), both, cuts, TrainConfig(layout=layout), 1 << 20)

    assert sum(int(mask.sum()) for mask in both.loss_masks) * V * 4 > 2**20
    assert distance(parts[0], whole[0]) < 1e-6
    assert distance(parts[1], whole[1]) < 1e-6


@pytest.mark.parametrize("chunk_bytes", [HEAD_CHUNK_BYTES, 1 << 20])
@pytest.mark.parametrize("layout", ["padded", "varlen"])
def test_a_rows_load_balancing_loss_is_that_of_the_row_alone(layout: Any, chunk_bytes: int) -> None:
    model, samples = model_of(BALANCED), rows_with_prompts()
    alone = [
        model(input_ids=torch.from_numpy(ids[None].astype(np.int64)), output_router_logits=True).aux_loss
        for ids in samples.token_ids
    ]
    config = TrainConfig(layout=layout)
    packer = Packer(config, choose_layout(model, config, CPU), CPU)
    policy = PolicyModel(model, is_partitioned=False, chunk_bytes=chunk_bytes)
    policy.balances = True

    policy.values(model, packer.micro_batch(samples, list(range(9)), [""]), entropy_gradient=False)

    assert policy.balance is not None
    assert policy.balance.tolist() == pytest.approx([each.item() for each in alone], rel=1e-5)
    assert max(alone) - min(alone) > 1e-3
    policy.balance.sum().backward()
    assert all(layer.mlp.gate.weight.grad.norm() > 0.0 for layer in model.model.layers)


def test_a_micro_batch_without_rows_has_no_load_balancing_loss() -> None:
    model, samples = model_of(BALANCED), rows_with_prompts()
    policy = PolicyModel(model, is_partitioned=False)
    policy.balances = True

    policy.values(
        model, Packer(TrainConfig(), "padded", CPU).micro_batch(samples, [], [""]), entropy_gradient=False
    )

    assert policy.balance is not None
    policy.balance.sum().backward()
    assert float(model.model.layers[0].mlp.gate.weight.grad.norm()) == 0.0


def test_transformations_of_logits_are_applied_in_every_chunk() -> None:
    first, second = rows_with_prompts(), rows_with_prompts(1)
    samples = Samples.from_tokens(first.token_ids + second.token_ids, first.loss_masks + second.loss_masks)
    cuts = [list(range(18))]
    whole = outcome(model_of(CAPPED), samples, cuts, TrainConfig(layout="padded"))
    parts = outcome(model_of(CAPPED), samples, cuts, TrainConfig(layout="padded"), 1 << 20)

    assert distance(parts[0], whole[0]) < 1e-6
    assert distance(parts[1], whole[1]) < 1e-6


def test_models_that_cannot_pack_sequences_are_padded_or_refused() -> None:
    states = Qwen3NextConfig(**SIZES, num_experts=2, num_experts_per_tok=1)
    for config, cause in ((CAPPED, "caps the scores"), (states, "a custom attention")):
        model = model_of(config)
        assert choose_layout(model, TrainConfig(), CPU) == "padded"
        with pytest.raises(ConfigError, match=cause):
            choose_layout(model, TrainConfig(layout="varlen"), CPU)


SINKS = GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None)


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (SINKS, "ask for s_aux"),
        (NemotronConfig(**SIZES), "do not get the rows' boundaries"),
        # Takes packed rows, but its attention is not given the window.
        (PhimoeConfig(**SIZES, num_local_experts=2, sliding_window=100), "differ from padded ones"),
        # Attends to later tokens too.
        (BertConfig(**SIZES, is_decoder=False), "differ from padded ones"),
    ],
)
def test_a_model_that_cannot_pack_rows_is_padded_at_load_and_logged(
    config: Any, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(config)

    assert choose_layout(model, TrainConfig(), CPU) == "padded"
    assert cause in caplog.text
    with pytest.raises(ConfigError, match=cause):
        choose_layout(model, TrainConfig(layout="varlen"), CPU)
    samples = rows_with_prompts()
    found, _ = outcome(model, samples, [list(range(9))], TrainConfig())
    assert all(torch.isfinite(each).all() for each in found.values())


def test_rows_are_padded_on_all_ranks_if_the_trial_fails_on_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        layout_module, "all_gather_messages", lambda own, kind: [own, "it failed on this rank", own]
    )

    assert choose_layout(model_of(CONFIGS["grouped heads"]), TrainConfig(), CPU) == "padded"
    assert "it failed on this rank" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trial_finds_an_attention_that_mixes_two_rows(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mix_last_rows(*tensors: Any, packed: Any, **others: Any) -> Any:
        *lengths, last, least = packed.lengths
        ends = torch.cat([packed.cu_seqlens[:-2], packed.cu_seqlens[-1:]])
        mixed = replace(packed, lengths=[*lengths, last + least], cu_seqlens=ends)
        return varlen_attention(*tensors, packed=mixed, **others)

    AttentionInterface.register("mixes_last_rows", mix_last_rows)
    config = CONFIGS["grouped heads"]
    assert compare_layouts(create_small_model(config, is_narrow=True), CPU, dtype).is_equal

    monkeypatch.setattr(layout_trial, "ATTENTION", "mixes_last_rows")
    assert not compare_layouts(create_small_model(config, is_narrow=True), CPU, dtype).is_equal


def test_a_model_whose_attention_takes_packed_rows_is_not_padded() -> None:
    for config in CONFIGS.values():
        assert choose_layout(model_of(config), TrainConfig(), CPU) == "varlen"
