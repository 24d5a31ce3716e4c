"""Where the parts of an Arrow IPC file lie: its footer, read without trusting a byte of it."""

import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

_END = struct.Struct("<i6s")
_MAGIC = b"ARROW1"
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
_RECORD_BATCHES = 4 + 2 * 3
"""Place in the vtable of a Footer (Arrow's File.fbs): two sizes, then version, schema and dictionaries."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of an Arrow IPC file lie.

    Attributes:
        tail: first byte of the last record batch, which begins the file's tail.
        headers: first byte of the metadata of each batch before it, and the one after its last.
    """

    tail: int
    headers: tuple[tuple[int, int], ...]


def places_of(source: pa.NativeFile, size: int) -> Places:
    """Where the parts of an Arrow IPC file of `size` bytes lie.

    Raises:
        ValueError: it is no Arrow file, or not all of one.
    """
    if size < _END.size:
        raise ValueError(f"it has {size} bytes")
    length, magic = _END.unpack(source.read_at(_END.size, size - _END.size))
    begin = size - _END.size - length
    if magic != _MAGIC or not length > 0 or begin < 0:
        raise ValueError("it does not end as an Arrow file does")
    try:
        blocks = _record_batches(source.read_at(length, begin))
    except struct.error as error:
        raise ValueError(f"its footer is none: {error}") from error
    if not len(blocks):
        raise ValueError("it has no batches")
    tail, starts = int(blocks["offset"][-1]), blocks["offset"][:-1]
    ends = starts + blocks["metadata"][:-1]
    if not 0 < tail < begin or (starts < 0).any() or (starts > ends).any() or (ends > tail).any():
        raise ValueError("its footer points to what is not there")
    return Places(tail, tuple(zip(starts.tolist(), ends.tolist(), strict=True)))


def _record_batches(footer: bytes) -> np.ndarray:
    """The record batches that a footer lists, in the order they were written."""
    (table,) = struct.unpack_from("<I", footer, 0)
    (back,) = struct.unpack_from("<i", footer, table)
    (field,) = struct.unpack_from("<H", footer, table - back + _RECORD_BATCHES)
    (ahead,) = struct.unpack_from("<I", footer, table + field)
    (count,) = struct.unpack_from("<I", footer, table + field + ahead)
    return np.frombuffer(footer, _BLOCK, count, table + field + ahead + 4)
