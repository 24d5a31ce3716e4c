"""Which byte of which tensor travels in which bucket: a pure plan that sender and receiver share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

ALIGNMENT = 16
"""Bytes to which a tensor's start is rounded up, so that a view of any type is aligned."""

ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


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
class TransferPlan:
    """All weights as one stream of bytes, cut into buckets of equal size, the last one shorter.

    Tensors are split across buckets wherever a bucket ends: an embedding can be a quarter of all bytes.
    """

    tensors: tuple[TensorPlan, ...]
    total_bytes: int
    bucket_bytes: int

    def buckets(self) -> Iterator[tuple[int, int]]:
        """(first byte, end) of each bucket. Example: 10 bytes in buckets of 4 are (0, 4), (4, 8), (8, 10)."""
        for start in range(0, self.total_bytes, self.bucket_bytes):
            yield start, min(start + self.bucket_bytes, self.total_bytes)

    def to_json(self) -> dict[str, Any]:
        """For the server's /update_weights."""
        return asdict(self)

    @classmethod
    def from_json(
        cls, tensors: Sequence[Mapping[str, Any]], total_bytes: int, bucket_bytes: int
    ) -> "TransferPlan":
        """What `to_json` gave."""
        plans = (TensorPlan(**{**each, "shape": tuple(each["shape"])}) for each in tensors)
        return cls(tuple(plans), total_bytes, bucket_bytes)


def plan_transfer(metas: Sequence[tuple[str, Sequence[int], str]], bucket_bytes: int) -> TransferPlan:
    """Lay out tensors, given as (name, shape, dtype name), one after another.

    Example: a float32 tensor of 3 elements and one of 2 lie at the offsets 0 and 16, 24 bytes in all.

    Raises:
        ValueError: an element type that cannot be sent, or a bucket of no bytes.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes cannot hold anything")
    tensors, offset = [], 0
    for name, shape, dtype in metas:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name} is of type {dtype}; {', '.join(ITEM_BYTES)} can be sent")
        size = prod(shape) * ITEM_BYTES[dtype]
        tensors.append(TensorPlan(name, dtype, tuple(shape), offset, size))
        offset = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
    total = tensors[-1].offset + tensors[-1].size_bytes if tensors else 0
    return TransferPlan(tuple(tensors), total, bucket_bytes)
