"""Encodes how bytes differ from an earlier state of them, and applies that; exact for every bit pattern.

Weights change little in an update: in bfloat16 at a learning rate of 1e-6 one element in a hundred, most by the smallest
step there is. Elements are compared and subtracted as unsigned integers, so -0.0 and NaN are values as all others.

A buffer is encoded in chunks, each in the smallest of these forms:

    same      no element differs
    sparse    gaps between changed elements, and the changes
    dense     the change of every element
    whole     the new bytes

A change is new - old modulo 2**bits, in zigzag order (0, -1, 1, -2, ... are 0, 1, 2, 3, ...). The first, second, ... bytes of
all changes are stored together and compressed with zlib's run lengths and Huffman codes, which compress them as well as zstd.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.ranges import Range

CHUNK_BYTES = 4 << 20
"""Bytes that are encoded at a time, by one thread."""

_SAME, _SPARSE, _DENSE, _WHOLE = range(4)
# Form, bytes of an element, CRC-32 of the new bytes, number of changed elements.
_CHUNK = struct.Struct("<BBII")
# Bytes as stored, bytes before compression; equal if compression does not help.
_STREAM = struct.Struct("<II")
# A gap of this many unchanged elements and more takes several bytes.
_LONG_GAP = 255
# Above this entropy, in bits a byte, compression saves less than its time is worth.
_DENSE_BITS = 7.6
_SAMPLES = 1 << 14

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class ByteRun:
    """Several buffers, [n] uint8 each, that are read and written as if they were one.

    Args:
        parts: the buffers, in order.
    """

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self._parts = [each for each in parts if len(each)]
        self._starts = np.cumsum([0, *map(len, self._parts)]).tolist()

    @property
    def size_bytes(self) -> int:
        """Size of all buffers together."""
        size: int = self._starts[-1]
        return size

    def read(self, first: int, end: int) -> Bytes:
        """Return the bytes from `first` to `end`: a view if they are in one buffer, else a copy."""
        found = [part[start:stop] for part, (start, stop) in self._cut(first, end)]
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, np.uint8)])

    def write(self, first: int, data: Bytes) -> None:
        """Replace the bytes from `first` on; does nothing for a view of them that `read` returned."""
        done = 0
        for part, (start, stop) in self._cut(first, first + len(data)):
            if not np.shares_memory(part[start:stop], data):
                part[start:stop] = data[done : done + stop - start]
            done += stop - start

    def _cut(self, first: int, end: int) -> Iterator[tuple[Bytes, Range]]:
        number = int(np.searchsorted(self._starts, first, "right")) - 1
        while first < end:
            start, stop = self._starts[number : number + 2]
            yield self._parts[number], (first - start, min(end, stop) - start)
            first, number = stop, number + 1


Encode = Callable[[Range], bytes]
MapChunks = Callable[[Encode, Sequence[Range]], Iterator[bytes]]
"""Calls a function with each range, perhaps in several threads; returns the results in order."""


def encode_changes(
    old: Bytes, new: ByteRun, item_bytes: int, map_chunks: MapChunks = map
) -> tuple[bytes, bool]:
    """Encode how `new` differs from `old`, which has as many bytes, and make `old` equal to `new`.

    Returns:
        The encoded changes, and True if anything differs.

    Args:
        old: [n] uint8 of the earlier state.
        new: the new bytes.
        item_bytes: size of an element, 1, 2, 4 or 8; it decides how small the result is, not whether it is right.
        map_chunks: maps over chunks.
    """

    def encode(chunk: Range) -> bytes:
        return _encode_chunk(old[slice(*chunk)], new.read(*chunk), item_bytes)

    chunks = list(map_chunks(encode, _cut_chunks(new.size_bytes)))
    return b"".join(chunks), any(each[0] != _SAME for each in chunks)


def apply_changes(old: ByteRun, changes: memoryview) -> None:
    """Make bytes equal to those from which `changes` were encoded with them as the earlier state.

    Raises:
        SyncError: the changes are damaged, or belong to another state; the bytes are undefined then.
    """
    reader = _Reader(changes)
    for first, end in _cut_chunks(old.size_bytes):
        form, item_bytes, expected, n_changed = reader.unpack(_CHUNK)
        if form == _SAME:
            continue
        chunk = old.read(first, end)
        try:
            _apply_chunk(chunk, reader, form, item_bytes, n_changed)
        except (ValueError, IndexError, TypeError, zlib.error) as error:
            raise SyncError(f"the changes of bytes {first} to {end} cannot be read: {error}") from error
        if (found := zlib.crc32(chunk.data)) != expected:
            raise SyncError(
                f"bytes {first} to {end} have the checksum {found:08x} with the changes, the sender's have {expected:08x}: "
                "they were other bytes before"
            )
        old.write(first, chunk)
    if reader.rest:
        raise SyncError(f"expected no more changes, got {len(reader.rest)} bytes")


def _cut_chunks(size_bytes: int) -> list[Range]:
    return [(first, min(first + CHUNK_BYTES, size_bytes)) for first in range(0, size_bytes, CHUNK_BYTES)]


def _encode_chunk(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    """Encode how a chunk differs, and make `old` equal to `new`."""
    if len(new) % item_bytes:
        item_bytes = 1
    before, after = (each.view(f"u{item_bytes}") for each in (old, new))
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return _CHUNK.pack(_SAME, item_bytes, 0, 0)
    # Half of all elements: from there on, gaps take as much as the changes of 0 between them.
    if len(changed) <= len(after) // 2:
        form, values = _SPARSE, after[changed]
        streams = [_encode_gaps(changed), *_cut_planes(values - before[changed])]
        before[changed] = values
    else:
        form, streams = _DENSE, _cut_planes(after - before)
        old[:] = new
    body = b"".join(map(_compress, streams))
    if len(body) >= len(new):
        form, body = _WHOLE, new.tobytes()
    return _CHUNK.pack(form, item_bytes, zlib.crc32(new.data), len(changed)) + body


def _apply_chunk(chunk: Bytes, reader: "_Reader", form: int, item_bytes: int, n_changed: int) -> None:
    """Apply the changes that come next to a chunk."""
    if form == _WHOLE:
        chunk[:] = np.frombuffer(reader.take(len(chunk)), np.uint8)
        return
    items = chunk.view(f"u{item_bytes}")
    if form == _SPARSE:
        changed = _decode_gaps(reader.decompress(2 * len(items)), n_changed)
        planes = [reader.decompress(n_changed) for _ in range(item_bytes)]
        # In two steps, so that a position beyond the end is an error.
        items[changed] = items[changed] + _join_planes(planes)
    elif form == _DENSE:
        items += _join_planes([reader.decompress(len(items)) for _ in range(item_bytes)])
    else:
        raise ValueError(f"there is no form {form}")


def _encode_gaps(positions: np.ndarray) -> Bytes:
    """Encode ascending positions as the number of elements before each: bytes of 255 to be added to the next one, then the rest."""
    gaps = np.diff(positions, prepend=-1) - 1
    n_long = gaps // _LONG_GAP
    encoded = np.full(len(gaps) + int(n_long.sum()), _LONG_GAP, np.uint8)
    encoded[np.cumsum(n_long + 1) - 1] = gaps % _LONG_GAP
    return encoded


def _decode_gaps(encoded: Bytes, n_changed: int) -> np.ndarray:
    """Decode `n_changed` positions; raises ValueError if there are not as many."""
    ends = np.flatnonzero(encoded != _LONG_GAP)
    if len(ends) != n_changed:
        raise ValueError(f"expected {n_changed} positions, found {len(ends)}")
    positions: np.ndarray = np.cumsum(encoded, dtype=np.int64)[ends] + np.arange(n_changed)
    return positions


def _cut_planes(changes: np.ndarray) -> list[Bytes]:
    """Return the bytes of changes, [n] unsigned, in zigzag order: all first bytes, all second bytes, ..."""
    bits = 8 * changes.itemsize
    zigzag = (changes << 1) ^ np.negative(changes >> (bits - 1))
    by_item = zigzag.view(np.uint8).reshape(-1, changes.itemsize)
    return [np.ascontiguousarray(by_item[:, byte]) for byte in range(changes.itemsize)]


def _join_planes(planes: Sequence[Bytes]) -> np.ndarray:
    """Return the changes, [n] unsigned, of which `_cut_planes` made the planes."""
    zigzag = np.stack(planes, axis=1).reshape(-1).view(f"u{len(planes)}")
    changes: np.ndarray = (zigzag >> 1) ^ np.negative(zigzag & 1)
    return changes


def _compress(data: Bytes) -> bytes:
    """Return a stream: its two sizes, and its bytes, compressed if that makes them fewer."""
    stored: bytes = data.tobytes()
    if _entropy_bits(data[:: max(len(data) // _SAMPLES, 1)]) <= _DENSE_BITS:
        coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
        coded = coder.compress(data.data) + coder.flush()
        stored = min(stored, coded, key=len)
    return _STREAM.pack(len(stored), len(data)) + stored


def _entropy_bits(data: Bytes) -> float:
    """Return the Shannon entropy of bytes, in bits a byte."""
    counts = np.bincount(data, minlength=256)
    shares = counts[counts > 0] / len(data)
    return float(-(shares * np.log2(shares)).sum())


class _Reader:
    """Reads encoded changes from their beginning on.

    Attributes:
        rest: the bytes that were not read yet.
    """

    def __init__(self, changes: memoryview) -> None:
        self.rest = changes

    def take(self, n_bytes: int) -> memoryview:
        """Return the next bytes.

        Raises:
            ValueError: there are not as many.
        """
        if len(self.rest) < n_bytes:
            raise ValueError(f"expected {n_bytes} bytes, found {len(self.rest)}")
        taken, self.rest = self.rest[:n_bytes], self.rest[n_bytes:]
        return taken

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        """Return the next numbers.

        Raises:
            SyncError: the changes have ended.
        """
        try:
            return layout.unpack(self.take(layout.size))
        except ValueError as error:
            raise SyncError(f"the changes end too early: {error}") from error

    def decompress(self, most_bytes: int) -> Bytes:
        """Return the next stream; raises ValueError or zlib.error if it is damaged or has more than `most_bytes`."""
        n_stored, n_bytes = self.unpack(_STREAM)
        if n_bytes > most_bytes:
            raise ValueError(f"expected at most {most_bytes} bytes, found {n_bytes}")
        stored: bytes | memoryview = self.take(n_stored)
        if n_stored != n_bytes:
            stored = zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, n_bytes)
        if len(stored) != n_bytes:
            raise ValueError(f"expected {n_bytes} bytes, found {len(stored)}")
        return np.frombuffer(stored, np.uint8)
