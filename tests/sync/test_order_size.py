"""The size of the order that every server gets at every sync, for models and trainers of the largest planned size."""

from collections.abc import Iterator

import msgspec
import pytest

from rollmill.tasks.sync.transfer_plan import STREAMS, TensorCut, TensorPlan, TransferPlan, lay_out_tensors
from rollmill.tasks.sync.weight_messages import WeightUpdateRequest, encode_plan

LIMIT_BYTES = 1_000_000
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def name_attention(layer: str, hidden: int, queries: int, keys: int) -> Shapes:
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{layer}.self_attn.{name}_proj.weight", (width, hidden)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)


def name_feed_forward(layer: str, hidden: int, width: int) -> Shapes:
    yield f"{layer}.gate_proj.weight", (width, hidden)
    yield f"{layer}.up_proj.weight", (width, hidden)
    yield f"{layer}.down_proj.weight", (hidden, width)


def name_dense() -> Shapes:
    """Tensors of Qwen2.5-32B."""
    yield "model.embed_tokens.weight", (152_064, 5120)
    for layer in (f"model.layers.{number}" for number in range(64)):
        yield from name_attention(layer, 5120, 5120, 1024)
        for name, width in (("q", 5120), ("k", 1024), ("v", 1024)):
            yield f"{layer}.self_attn.{name}_proj.bias", (width,)
        yield from name_feed_forward(f"{layer}.mlp", 5120, 27_648)
        yield f"{layer}.input_layernorm.weight", (5120,)
        yield f"{layer}.post_attention_layernorm.weight", (5120,)
    yield "model.norm.weight", (5120,)
    yield "lm_head.weight", (152_064, 5120)


def name_experts() -> Shapes:
    """Tensors of Qwen3-30B-A3B."""
    yield "model.embed_tokens.weight", (151_936, 2048)
    for layer in (f"model.layers.{number}" for number in range(48)):
        yield from name_attention(layer, 2048, 4096, 512)
        yield f"{layer}.self_attn.q_norm.weight", (128,)
        yield f"{layer}.self_attn.k_norm.weight", (128,)
        yield f"{layer}.mlp.gate.weight", (128, 2048)
        for expert in range(128):
            yield from name_feed_forward(f"{layer}.mlp.experts.{expert}", 2048, 768)
        yield f"{layer}.input_layernorm.weight", (2048,)
        yield f"{layer}.post_attention_layernorm.weight", (2048,)
    yield "model.norm.weight", (2048,)
    yield "lm_head.weight", (151_936, 2048)


def cut_parameters(tensors: tuple[TensorPlan, ...], n_ranks: int) -> tuple[TensorCut, ...]:
    """Cuts under ZeRO-3 of bfloat16 tensors that are parameters each."""
    return tuple(TensorCut(0, 2 * -(-each.size_bytes // 2 // n_ranks)) for each in tensors)


@pytest.mark.parametrize("n_ranks", [1, 64, 512])
@pytest.mark.parametrize(("shapes", "billions"), [(name_dense, 32.8), (name_experts, 30.5)])
def test_an_order_is_smaller_than_a_megabyte_whatever_the_number_of_ranks(
    shapes, billions: float, n_ranks: int
) -> None:
    tensors = lay_out_tensors((name, shape, "bfloat16") for name, shape in shapes())
    plan = TransferPlan(tensors, cut_parameters(tensors, n_ranks), n_ranks, streams=STREAMS)
    assert plan.total_bytes == pytest.approx(2e9 * billions, rel=0.01)
    order = WeightUpdateRequest("run:1:1", "keep", "tcp", encode_plan(plan), 120.0, 20.0)
    assert len(msgspec.json.encode(order)) < LIMIT_BYTES


def test_the_ranges_that_a_server_derives_from_an_order_are_the_whole_model() -> None:
    tensors = lay_out_tensors((name, shape, "bfloat16") for name, shape in name_experts())
    plan = TransferPlan(tensors, cut_parameters(tensors, 64), 64, streams=STREAMS)
    order = msgspec.json.encode(WeightUpdateRequest("run:1:1", "keep", "tcp", encode_plan(plan), 120.0, 20.0))
    received = msgspec.json.decode(order, type=WeightUpdateRequest).decode_plan()
    sent = sum(bucket.size_bytes for rank in range(64) for bucket in received.buckets(rank))
    assert sent == sum(each.size_bytes for each in tensors)
