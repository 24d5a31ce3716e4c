"""The transfer plan: which rank sends which bytes of which tensor in which bucket. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np

from rollmill.tasks.sync.ranges import Range, overlap

# Links of each trainer rank to each worker of a server: with two, one sends while the other waits for its peer.
STREAMS = 2
# Bytes of one transfer buffer: a network is busy with them, and a rank stages only some of them (STAGING_BUCKETS).
BUCKET_BYTES = 32 << 20
# Bytes: torch refuses a view of an element type at an offset that is no multiple of its size.
ALIGNMENT = 16

ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_LARGEST_ITEM = 8


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
class TensorCut:
    """How the ranks divide one tensor, which is a part of an array that is cut into shards of equal size.

    Rank r sends what the array's bytes from r * shard_bytes to (r + 1) * shard_bytes have of the tensor.

    Attributes:
        start: position in the array of the tensor's first byte.
        shard_bytes: size of a rank's shard, at least 1; the last shards may be shorter, or empty.
    """

    start: int
    shard_bytes: int

    def find_range(self, tensor: TensorPlan, rank: int) -> Range:
        """Return the part of `tensor` that rank `rank` sends: (first byte, byte after the last one) in the stream of all weights.

        It is empty, (n, n), if the rank sends none of it.
        """
        shard = rank * self.shard_bytes - self.start + tensor.offset
        return overlap((tensor.offset, tensor.offset + tensor.size_bytes), (shard, shard + self.shard_bytes))


@dataclass(frozen=True, slots=True)
class Bucket:
    """A unit of transfer: ranges of the stream, sent one after another without gaps."""

    ranges: tuple[Range, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of the bucket's ranges in bytes."""
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True)
class TransferPlan:
    """All weights as one stream of bytes, and the rule by which each trainer rank sends its part.

    The plan names no range of a rank, since there are about tensors x ranks of them; `buckets` derives them.

    Attributes:
        tensors: in the order of the stream.
        cuts: for each tensor how the ranks divide it.
        n_ranks: number of ranks that send, W.
        bucket_bytes: size of every bucket of a rank but its last.
        streams: links from each rank to each worker of a server; bucket n uses link n % streams.

    Raises:
        ValueError: `bucket_bytes` is less than 1.
    """

    tensors: tuple[TensorPlan, ...] = ()
    cuts: tuple[TensorCut, ...] = ()
    n_ranks: int = 1
    bucket_bytes: int = BUCKET_BYTES
    streams: int = 1

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"a bucket of {self.bucket_bytes} bytes cannot hold anything")

    @property
    def total_bytes(self) -> int:
        """Size of the stream in bytes."""
        return self.tensors[-1].offset + self.tensors[-1].size_bytes if self.tensors else 0

    def buckets(self, rank: int) -> tuple[Bucket, ...]:
        """Return what a rank sends, in stream order; a range that does not fit a bucket is split.

        The buckets of all ranks together have every byte of every tensor exactly once.
        """
        # Vectorized `TensorCut.find_range`: a receiver calls this for every rank, and a model may have 20,000 tensors.
        offsets, sizes, starts, shards = self._columns
        firsts = np.clip(rank * shards - starts, 0, sizes)
        ends = np.clip((rank + 1) * shards - starts, 0, sizes)
        sent = np.flatnonzero(firsts < ends)
        first, end = (offsets[sent] + firsts[sent]).tolist(), (offsets[sent] + ends[sent]).tolist()
        return _fill_buckets(zip(first, end, strict=True), self.bucket_bytes)

    @cached_property
    def _columns(self) -> np.ndarray:
        """[4, tensors] int64: offset and size of each tensor, start and size of its shards; all in bytes."""
        rows = [
            (tensor.offset, tensor.size_bytes, cut.start, cut.shard_bytes)
            for tensor, cut in zip(self.tensors, self.cuts, strict=True)
        ]
        return np.array(rows, np.int64).reshape(-1, 4).T


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


def share_evenly(tensors: Sequence[TensorPlan], n_ranks: int) -> tuple[TensorCut, ...]:
    """Divide tensors evenly among ranks that all hold all weights; returns the cut of each tensor.

    No element is divided, unless types are mixed. Example: of tensors of 24 and 8 bytes at offsets 0 and 32, rank 0 sends (0, 16), rank 1 sends (16, 24)
    and (32, 40).
    """
    starts = list(accumulate((each.size_bytes for each in tensors), initial=0))
    shard_bytes = max(-(-starts[-1] // (n_ranks * _LARGEST_ITEM)), 1) * _LARGEST_ITEM
    return tuple(TensorCut(start, shard_bytes) for start in starts[:-1])


def _fill_buckets(ranges: Iterable[Range], bucket_bytes: int) -> tuple[Bucket, ...]:
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
