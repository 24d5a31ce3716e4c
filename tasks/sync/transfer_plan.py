"""The transfer plan: which rank sends which bytes of which tensor in which bucket. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rollmill.tasks.sync.ranges import Range, cut_evenly

# Links of each trainer rank to each worker of a server: with two, one sends while the other waits for its peer.
STREAMS = 2
# Bytes of one transfer buffer: a network is busy with them, and a rank stages only some of them (STAGING_BUCKETS).
BUCKET_BYTES = 32 << 20
# Bytes: torch refuses a view of an element type at an offset that is no multiple of its size.
ALIGNMENT = 16

ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Name, type, shape and position of one tensor in the stream of all weights.

    Attributes:
        dtype: torch's name of the element type, "float32".
        offset: position in the stream of the tensor's first byte.
        size_bytes: size of the tensor, without padding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A unit of transfer: ranges of the stream, sent one after another without gaps."""

    ranges: tuple[Range, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of the bucket's ranges in bytes."""
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All weights as one stream of bytes, and the buckets that each trainer rank sends.

    Attributes:
        tensors: in the order of the stream.
        total_bytes: of the stream.
        senders: [W] buckets of each rank; together they hold every byte of every tensor exactly once.
        streams: links from each rank to each worker of a server; bucket n uses link n % streams.
    """

    tensors: tuple[TensorPlan, ...]
    total_bytes: int
    senders: tuple[tuple[Bucket, ...], ...]
    streams: int = 1


def lay_out_tensors(metas: Iterable[tuple[str, Sequence[int], str]]) -> tuple[TensorPlan, ...]:
    """Place tensors, given as (name, shape, dtype name), one after another in the stream.

    Example: float32 tensors of 3 and 2 elements get the offsets 0 and 16; the stream has 24 bytes.

    Raises:
        ValueError: a tensor has an element type that cannot be sent.
    """
    tensors, offset = [], 0
    for name, shape, dtype in metas:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name} has type {dtype}; weight sync supports {', '.join(ITEM_BYTES)}")
        size = prod(shape) * ITEM_BYTES[dtype]
        tensors.append(TensorPlan(name, dtype, tuple(shape), offset, size))
        offset = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
    return tuple(tensors)


def share_evenly(tensors: Sequence[TensorPlan], n_ranks: int) -> list[list[Range]]:
    """Divide the stream's bytes evenly among ranks that all hold all weights; returns the ranges of each rank, [W].

    Example: of tensors of 6 and 4 bytes at offsets 0 and 16, rank 0 sends (0, 5), rank 1 sends (5, 6) and (16, 20).
    """
    parts = cut_evenly([each.size_bytes for each in tensors], n_ranks)
    return [
        [(tensors[number].offset + first, tensors[number].offset + end) for number, (first, end) in part]
        for part in parts
    ]


def plan_transfer(
    tensors: Sequence[TensorPlan], shares: Sequence[Sequence[Range]], bucket_bytes: int, streams: int = 1
) -> TransferPlan:
    """Divide each rank's ranges into buckets, in stream order. A range that does not fit is split.

    Raises:
        ValueError: `bucket_bytes` is less than 1.
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
