"""The plan of a transfer, by properties."""

import zlib
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.transfer_plan import (
    ALIGNMENT,
    ITEM_BYTES,
    TensorCut,
    TransferPlan,
    lay_out_tensors,
    share_evenly,
)
from rollmill.tasks.sync.weight_messages import WeightUpdateRequest, encode_plan

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


def shard_each(tensors, n_ranks: int) -> tuple[TensorCut, ...]:
    """Cuts of tensors that are whole parameters under ZeRO-3."""
    return tuple(TensorCut(0, max(-(-each.size_bytes // n_ranks), 1)) for each in tensors)


@st.composite
def plans(draw) -> TransferPlan:
    """Draw a plan whose tensors are split evenly, or are whole parameters, or some of both."""
    tensors, ranks = lay_out_tensors(draw(metas)), draw(n_ranks)
    cuts = dict(enumerate(shard_each(tensors, ranks)))
    shared = [number for number in cuts if draw(st.booleans())]
    cuts |= zip(shared, share_evenly([tensors[number] for number in shared], ranks), strict=True)
    return TransferPlan(tensors, tuple(cuts.values()), ranks, draw(bucket_sizes))


@given(plans())
def test_every_byte_of_every_tensor_is_sent_by_one_rank_in_one_bucket(plan: TransferPlan) -> None:
    every = [bucket for rank in range(plan.n_ranks) for bucket in plan.buckets(rank)]
    sent = [byte for bucket in every for byte in bytes_in(bucket.ranges)]
    assert sorted(sent) == bytes_of(plan.tensors)


@given(plans())
def test_a_rank_sends_its_range_of_each_tensor_in_the_order_of_the_stream(plan: TransferPlan) -> None:
    for rank in range(plan.n_ranks):
        sent = [byte for bucket in plan.buckets(rank) for byte in bytes_in(bucket.ranges)]
        cuts = zip(plan.tensors, plan.cuts, strict=True)
        assert sent == bytes_in(cut.find_range(tensor, rank) for tensor, cut in cuts)


@given(plans())
def test_all_buckets_of_a_rank_but_the_last_are_full(plan: TransferPlan) -> None:
    for rank in range(plan.n_ranks):
        sizes = [bucket.size_bytes for bucket in plan.buckets(rank)]
        assert sizes[:-1] == [plan.bucket_bytes] * (len(sizes) - 1)
        assert all(0 < size <= plan.bucket_bytes for size in sizes)


@given(metas, n_ranks)
def test_no_rank_sends_more_than_an_even_share_rounded_up(metas, n_ranks: int) -> None:
    tensors = lay_out_tensors(metas)
    plan = TransferPlan(tensors, share_evenly(tensors, n_ranks), n_ranks)
    sizes = [sum(bucket.size_bytes for bucket in plan.buckets(rank)) for rank in range(n_ranks)]
    # In units of the largest element, so that none is divided.
    assert max(sizes) <= -(-sum(each.size_bytes for each in tensors) // (8 * n_ranks)) * 8


def test_tensors_that_are_slices_of_one_parameter_are_divided_as_the_parameter_is() -> None:
    # Two experts of 8 bytes in one parameter, of which each of 3 ranks has 6 bytes: 0-6, 6-12 and 12-16.
    tensors = lay_out_tensors([("expert.0", (2,), "float32"), ("expert.1", (2,), "float32")])
    plan = TransferPlan(tensors, (TensorCut(0, 6), TensorCut(8, 6)), 3)
    ranges = [[bucket.ranges for bucket in plan.buckets(rank)] for rank in range(3)]
    assert ranges == [[((0, 6),)], [((6, 8), (16, 20))], [((20, 24),)]]


@given(metas)
def test_tensors_are_in_order_aligned_and_never_overlap(metas):
    tensors = lay_out_tensors(metas)
    end = 0
    for (name, shape, dtype), each in zip(metas, tensors, strict=True):
        assert (each.name, each.shape, each.dtype) == (name, shape, dtype)
        assert each.size_bytes == prod(shape) * ITEM_BYTES[dtype]
        assert each.offset % ALIGNMENT == 0
        assert 0 <= each.offset - end < ALIGNMENT
        end = each.offset + each.size_bytes
    assert TransferPlan(tensors, share_evenly(tensors, 1)).total_bytes == end


@given(plans())
def test_a_plan_survives_the_way_to_the_server(plan: TransferPlan) -> None:
    # What is derived from it does not travel.
    plan.buckets(0)
    assert request_with(encode_plan(plan)).decode_plan() == plan


def request_with(plan: bytes) -> WeightUpdateRequest:
    return WeightUpdateRequest("run:1:1", "keep", "tcp", plan, 1.0, 1.0)


@pytest.mark.parametrize("plan", [b"no plan", encode_plan(TransferPlan())[:-5], zlib.compress(b"no plan")])
def test_a_plan_that_cannot_be_read_is_an_error_with_a_remedy(plan: bytes) -> None:
    with pytest.raises(SyncError, match=r"cannot read the transfer plan: .*need the same version"):
        request_with(plan).decode_plan()


def test_a_tensor_is_split_where_a_bucket_ends() -> None:
    tensors = lay_out_tensors([("small", (3,), "float32"), ("large", (6,), "float32")])
    assert [(each.offset, each.size_bytes) for each in tensors] == [(0, 12), (16, 24)]
    buckets = TransferPlan(tensors, share_evenly(tensors, 1), bucket_bytes=20).buckets(0)
    assert [bucket.ranges for bucket in buckets] == [((0, 12), (16, 24)), ((24, 40),)]


def test_a_type_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match=r"w has type int64; .*float32"):
        lay_out_tensors([("w", (1,), "int64")])


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        TransferPlan(bucket_bytes=0)
