"""The plan of a transfer, by properties."""

import json
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.sync.buckets import ALIGNMENT, ITEM_BYTES, TransferPlan, plan_transfer

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
metas = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=12).map(
    lambda found: [(f"tensor.{n}", shape, dtype) for n, (shape, dtype) in enumerate(found)]
)
bucket_sizes = st.integers(1, 300)


@given(metas, bucket_sizes)
def test_every_byte_of_the_stream_is_in_exactly_one_bucket(metas, bucket_bytes) -> None:
    plan = plan_transfer(metas, bucket_bytes)
    covered = [byte for start, end in plan.buckets() for byte in range(start, end)]
    assert covered == list(range(plan.total_bytes))


@given(metas, bucket_sizes)
def test_only_the_last_bucket_is_shorter(metas, bucket_bytes) -> None:
    sizes = [end - start for start, end in plan_transfer(metas, bucket_bytes).buckets()]
    assert sizes[:-1] == [bucket_bytes] * (len(sizes) - 1)
    assert all(0 < size <= bucket_bytes for size in sizes)


@given(metas, bucket_sizes)
def test_tensors_lie_in_order_aligned_and_never_on_each_other(metas, bucket_bytes) -> None:
    plan = plan_transfer(metas, bucket_bytes)
    ends = [0, *(tensor.offset + tensor.size_bytes for tensor in plan.tensors)]
    for tensor, end_before in zip(plan.tensors, ends[:-1], strict=True):
        assert tensor.offset % ALIGNMENT == 0
        assert 0 <= tensor.offset - end_before < ALIGNMENT
    assert ends[-1] == plan.total_bytes


@given(metas, bucket_sizes)
def test_a_plan_names_every_tensor_with_its_bytes(metas, bucket_bytes) -> None:
    plan = plan_transfer(metas, bucket_bytes)
    assert [(each.name, each.shape, each.dtype) for each in plan.tensors] == metas
    assert [each.size_bytes for each in plan.tensors] == [
        prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in metas
    ]


@given(metas, bucket_sizes)
def test_a_plan_survives_the_way_to_the_server(metas, bucket_bytes) -> None:
    plan = plan_transfer(metas, bucket_bytes)
    assert TransferPlan.from_json(**json.loads(json.dumps(plan.to_json()))) == plan


def test_a_tensor_is_split_where_a_bucket_ends() -> None:
    plan = plan_transfer([("small", (3,), "float32"), ("large", (6,), "float32")], 20)
    assert [(each.offset, each.size_bytes) for each in plan.tensors] == [(0, 12), (16, 24)]
    assert list(plan.buckets()) == [(0, 20), (20, 40)]


def test_a_type_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match=r"w is of type int64; .*float32"):
        plan_transfer([("w", (1,), "int64")], 8)


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        plan_transfer([("w", (1,), "float32")], 0)
