"""The plan of a transfer, by properties."""

from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.sync.transfer_plan import (
    ALIGNMENT,
    ITEM_BYTES,
    TransferPlan,
    lay_out_tensors,
    plan_transfer,
    share_evenly,
)
from rollmill.tasks.sync.weight_messages import encode_plan

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
metas = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=12).map(
    lambda found: [(f"tensor.{n}", shape, dtype) for n, (shape, dtype) in enumerate(found)]
)
n_ranks = st.integers(1, 9)
bucket_sizes = st.integers(1, 300)


def bytes_of(tensors) -> list[int]:
    return [byte for each in tensors for byte in range(each.offset, each.offset + each.size_bytes)]


def bytes_in(ranges) -> list[int]:
    return [byte for start, end in ranges for byte in range(start, end)]


@given(metas, n_ranks, bucket_sizes)
def test_every_byte_of_every_tensor_is_sent_by_one_rank_in_one_bucket(metas, n_ranks, bucket_bytes):
    tensors = lay_out_tensors(metas)
    plan = plan_transfer(tensors, share_evenly(tensors, n_ranks), bucket_bytes)
    sent = [byte for buckets in plan.senders for bucket in buckets for byte in bytes_in(bucket.ranges)]
    assert sorted(sent) == bytes_of(tensors)
    assert len(plan.senders) == n_ranks


@given(metas, n_ranks, bucket_sizes)
def test_each_rank_sends_in_the_order_of_the_stream_and_fills_all_buckets_but_the_last(
    metas, n_ranks, bucket_bytes
):
    tensors = lay_out_tensors(metas)
    for buckets in plan_transfer(tensors, share_evenly(tensors, n_ranks), bucket_bytes).senders:
        sent = [byte for bucket in buckets for byte in bytes_in(bucket.ranges)]
        assert sent == sorted(sent)
        sizes = [bucket.size_bytes for bucket in buckets]
        assert sizes[:-1] == [bucket_bytes] * (len(sizes) - 1)
        assert all(0 < size <= bucket_bytes for size in sizes)


@given(metas, n_ranks)
def test_even_shares_differ_by_a_byte_at_most(metas, n_ranks):
    tensors = lay_out_tensors(metas)
    sizes = [len(bytes_in(ranges)) for ranges in share_evenly(tensors, n_ranks)]
    assert max(sizes) - min(sizes) <= 1


@given(metas)
def test_tensors_lie_in_order_aligned_and_never_on_each_other(metas):
    tensors = lay_out_tensors(metas)
    end = 0
    for (name, shape, dtype), each in zip(metas, tensors, strict=True):
        assert (each.name, each.shape, each.dtype) == (name, shape, dtype)
        assert each.size_bytes == prod(shape) * ITEM_BYTES[dtype]
        assert each.offset % ALIGNMENT == 0
        assert 0 <= each.offset - end < ALIGNMENT
        end = each.offset + each.size_bytes
    assert plan_transfer(tensors, share_evenly(tensors, 1), 8).total_bytes == end


@given(metas, n_ranks, bucket_sizes)
def test_a_plan_survives_the_way_to_the_server(metas, n_ranks, bucket_bytes):
    tensors = lay_out_tensors(metas)
    plan = plan_transfer(tensors, share_evenly(tensors, n_ranks), bucket_bytes)
    assert msgspec.json.decode(encode_plan(plan), type=TransferPlan) == plan


def test_a_tensor_is_split_where_a_bucket_ends() -> None:
    tensors = lay_out_tensors([("small", (3,), "float32"), ("large", (6,), "float32")])
    assert [(each.offset, each.size_bytes) for each in tensors] == [(0, 12), (16, 24)]
    (buckets,) = plan_transfer(tensors, share_evenly(tensors, 1), 20).senders
    assert [bucket.ranges for bucket in buckets] == [((0, 12), (16, 24)), ((24, 40),)]


def test_a_type_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match=r"w has type int64; .*float32"):
        lay_out_tensors([("w", (1,), "int64")])


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        plan_transfer(lay_out_tensors([("w", (1,), "float32")]), [[(0, 4)]], 0)
