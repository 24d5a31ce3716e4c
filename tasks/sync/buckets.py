"""Which rank sends which byte of which tensor in which bucket: a pure plan that senders and receivers share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

ALIGNMENT = 16
"""Bytes to which a tensor's start is rounded up, so that a view of any type is aligned."""

ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

Range = tuple[int, int]
"""(first byte, end) in the stream of all weights."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Where one tensor lies in the stream of all weights.

    Attributes:
        dtype: torch's name of the element type, "float32".
        offset: its first byte in the stream.
        size_bytes: its bytes, without what aligns the next one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels at once: ranges of the stream, one after another without gaps."""

    ranges: tuple[Range, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its ranges."""
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All weights as one stream of bytes, and who sends which part of it in which order.

    Attributes:
        tensors: in the order of the stream.
        total_bytes: of the stream.
        senders: [W] each rank's buckets; every byte of every tensor is in exactly one of all of them.
        streams: links of each rank to each worker of a server; bucket n goes by link n % streams.
    """

    tensors: tuple[TensorPlan, ...]
    total_bytes: int
    senders: tuple[tuple[Bucket, ...], ...]
    streams: int = 1

    def to_json(self) -> dict[str, Any]:
        """For servers."""
        senders = [[bucket.ranges for bucket in buckets] for buckets in self.senders]
        return {
            "tensors": [asdict(each) for each in self.tensors],
            "total_bytes": self.total_bytes,
            "senders": senders,
            "streams": self.streams,
        }

    @classmethod
    def from_json(
        cls,
        tensors: Sequence[Mapping[str, Any]],
        total_bytes: int,
        senders: Sequence[Sequence[Sequence[Sequence[int]]]],
        streams: int,
    ) -> "TransferPlan":
        """What `to_json` gave."""
        plans = (TensorPlan(**{**each, "shape": tuple(each["shape"])}) for each in tensors)
        buckets = (
            tuple(Bucket(tuple((start, end) for start, end in ranges)) for ranges in each) for each in senders
        )
        return cls(tuple(plans), total_bytes, tuple(buckets), streams)


def lay_out(metas: Iterable[tuple[str, Sequence[int], str]]) -> tuple[TensorPlan, ...]:
    """Tensors, given as (name, shape, dtype name), one after another.

    Example: a float32 tensor of 3 elements and one of 2 lie at the offsets 0 and 16, 24 bytes in all.

    Raises:
        ValueError: an element type that cannot be sent.
    """
    tensors, offset = [], 0
    for name, shape, dtype in metas:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name} is of type {dtype}; {', '.join(ITEM_BYTES)} can be sent")
        size = prod(shape) * ITEM_BYTES[dtype]
        tensors.append(TensorPlan(name, dtype, tuple(shape), offset, size))
        offset = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
    return tuple(tensors)


def even_shares(tensors: Sequence[TensorPlan], n_ranks: int) -> list[list[Range]]:
    """[W] ranges for ranks that all hold everything: as many bytes each as can be.

    Example: tensors of 6 and 4 bytes at the offsets 0 and 16 are (0, 5) for rank 0, (5, 6) and (16, 20) for rank 1.
    """
    total = sum(each.size_bytes for each in tensors)
    shares: list[list[Range]] = []
    for rank in range(n_ranks):
        first, end, at = rank * total // n_ranks, (rank + 1) * total // n_ranks, 0
        ranges = []
        for each in tensors:
            begin, stop = max(first - at, 0), min(end - at, each.size_bytes)
            if begin < stop:
                ranges.append((each.offset + begin, each.offset + stop))
            at += each.size_bytes
        shares.append(ranges)
    return shares


def plan_transfer(
    tensors: Sequence[TensorPlan], shares: Sequence[Sequence[Range]], bucket_bytes: int, streams: int = 1
) -> TransferPlan:
    """Put each rank's ranges into buckets, in the order of the stream; ranges are split where a bucket ends.

    Raises:
        ValueError: a bucket of no bytes.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes cannot hold anything")
    total = tensors[-1].offset + tensors[-1].size_bytes if tensors else 0
    return TransferPlan(
        tuple(tensors), total, tuple(_buckets(each, bucket_bytes) for each in shares), streams
    )


def _buckets(ranges: Iterable[Range], bucket_bytes: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    current: list[Range] = []
    room = bucket_bytes
    for start, end in ranges:
        while start < end:
            stop = min(end, start + room)
            current.append((start, stop))
            room -= stop - start
            start = stop
            if not room:
                buckets.append(Bucket(tuple(current)))
                current, room = [], bucket_bytes
    return (*buckets, Bucket(tuple(current))) if current else tuple(buckets)
