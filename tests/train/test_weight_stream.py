"""What the ranks send, put together, is the checkpoint: in one process here, with several ranks below."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import Transpose, WeightConverter

from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.sync.ranges import Range
from rollmill.tasks.sync.transfer_plan import TransferPlan
from rollmill.tasks.train.checkpoints.hf_export import gather_weights
from rollmill.tasks.train.checkpoints.hf_layout import weight_layers
from rollmill.tasks.train.weight_stream import WeightStream

SIZES = {
    "vocab_size": 57,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, tie_word_embeddings=False),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=3, head_dim=8, tie_word_embeddings=False),
}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name])


def stream_of(model: PreTrainedModel, rank: int, world_size: int) -> WeightStream:
    return WeightStream(model, weight_layers(model), rank, world_size)


def put_together(stream: WeightStream, pieces: list[Piece]) -> dict[str, torch.Tensor]:
    last = stream.tensors[-1]
    buffer = torch.zeros(last.offset + last.size_bytes, dtype=torch.uint8)
    for piece in pieces:
        data = as_bytes(piece.data)
        buffer[piece.offset : piece.offset + len(data)] = data
    return {
        each.name: buffer[each.offset : each.offset + each.size_bytes]
        .view(getattr(torch, each.dtype))
        .view(each.shape)
        for each in stream.tensors
    }


def give_shard(model: PreTrainedModel, rank: int, world_size: int) -> None:
    """What ZeRO-3 leaves of each parameter on a rank: its part of a padded flat copy."""
    for parameter in model.parameters():
        size = -(-parameter.numel() // world_size)
        padded = torch.full((size * world_size,), torch.nan)
        padded[: parameter.numel()] = parameter.detach().flatten()
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.partition_numel = lambda size=size: size
        parameter.ds_tensor = padded[rank * size : (rank + 1) * size]


def plan_ranges(stream: WeightStream, rank: int, world_size: int) -> list[Range]:
    """What a server expects of a rank: the ranges that it derives from the plan."""
    plan = TransferPlan(stream.tensors, stream.cuts, world_size, bucket_bytes=1 << 40)
    return [each for bucket in plan.buckets(rank) for each in bucket.ranges]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(list(CONFIGS)), st.integers(1, 5))
def test_the_pieces_of_ranks_that_have_everything_are_all_weights_once(name: str, world_size: int) -> None:
    model = model_of(name)
    streams = [stream_of(model, rank, world_size) for rank in range(world_size)]
    pieces = [list(stream.pieces(model)) for stream in streams]
    assert_same(put_together(streams[0], list(itertools.chain(*pieces))), dict(gather_weights(model)))
    ranges = [[(each.offset, each.offset + each.data.nbytes) for each in some] for some in pieces]
    assert all(
        some == plan_ranges(stream, rank, world_size)
        for rank, (some, stream) in enumerate(zip(ranges, streams, strict=True))
    )
    assert sum(end - start for some in ranges for start, end in some) == sum(
        each.size_bytes for each in streams[0].tensors
    )


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["dense", "tied", "experts", "mixtral"]), st.integers(1, 5))
def test_the_pieces_of_ranks_with_shards_are_all_weights_once(name: str, world_size: int) -> None:
    expected = dict(gather_weights(model_of(name)))
    pieces = []
    for rank in range(world_size):
        model = model_of(name)
        give_shard(model, rank, world_size)
        stream = stream_of(model, rank, world_size)
        own = list(stream.pieces(model))
        ranges = [(each.offset, each.offset + each.data.nbytes) for each in own]
        assert ranges == plan_ranges(stream, rank, world_size)
        assert all(each.is_live for each in own)
        pieces += own
    assert_same(put_together(stream, pieces), expected)
    assert sum(each.data.nbytes for each in pieces) == sum(each.nbytes for each in expected.values())


def store_transposed(model: PreTrainedModel) -> None:
    """Have the checkpoint keep a weight of each layer the other way round."""
    pattern = "mlp.down_proj.weight"
    model._weight_conversions = [WeightConverter(f"stored.{pattern}", pattern, [Transpose(0, 1)])]


def test_layers_in_another_order_than_in_memory_are_sent_too() -> None:
    model = model_of("dense")
    store_transposed(model)
    expected = dict(gather_weights(model))
    streams = [stream_of(model, rank, 3) for rank in range(3)]
    pieces = [list(stream.pieces(model)) for stream in streams]
    assert_same(put_together(streams[0], list(itertools.chain(*pieces))), expected)
    assert [layer.origins is None for layer in weight_layers(model)] == [False, True, True, False, False]
    assert all(pieces)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_sent_from_where_the_model_has_them(name: str) -> None:
    model = model_of(name)
    owned = {each.untyped_storage().data_ptr() for each in model.parameters()}
    pieces = list(stream_of(model, 0, 1).pieces(model))
    assert all(each.is_live and each.data.untyped_storage().data_ptr() in owned for each in pieces)


def case(model: str, zero_stage: int, dtype: str = "float32", lora: str = "") -> dict[str, Any]:
    return {"model": model, "zero_stage": zero_stage, "dtype": dtype, "lora": lora}


PAIRWISE = [
    case("dense", 0, "float32"),
    case("tied", 1, "bfloat16"),
    case("experts", 2, "float32", "adapters"),
    case("tied", 3, "float32"),
    case("experts", 3, "bfloat16"),
    case("dense", 3, "bfloat16", "merged"),
]
PRODUCT = {
    dtype: [
        case(model, stage, dtype, lora)
        for model, stage, lora in itertools.product(
            ("dense", "tied", "experts", "mixtral"), range(4), ("", "merged", "adapters")
        )
    ]
    for dtype in ("float32", "bfloat16")
}


@pytest.mark.service
@pytest.mark.parametrize(
    ("n_ranks", "cases"),
    [
        pytest.param(2, PAIRWISE, id="2-pairwise"),
        *(
            pytest.param(n_ranks, cases, id=f"{n_ranks}-{dtype}", marks=pytest.mark.long)
            for n_ranks in (1, 2)
            for dtype, cases in PRODUCT.items()
        ),
        pytest.param(3, PAIRWISE, id="3-pairwise", marks=pytest.mark.long),
    ],
)
def test_the_weights_that_ranks_send_write_and_digest_are_those_they_train(
    n_ranks: int,
    cases: list[dict[str, Any]],
    run_ranks: Callable[[str, int, dict[str, object]], None],
    tmp_path: Path,
) -> None:
    for name in {each["model"] for each in cases}:
        model_of(name).save_pretrained(tmp_path / name)
    placed = [each | {"model": str(tmp_path / each["model"])} for each in cases]
    run_ranks("stream_ranks.py", n_ranks, {"cases": placed, "folder": str(tmp_path / "weights")})
