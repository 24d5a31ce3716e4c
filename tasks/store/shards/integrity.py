"""Detect damaged shards: hashes cover every byte of a file, and its name holds the hash of its end.

    | blocks of 128 KiB: magic, schema, batches ... | last batch, of zero rows | footer |
                                                    '------------ the tail ------------'

The last batch carries the XXH3-64 of each block before it in its custom metadata; the shard's name carries the
XXH3-64 of the tail. So name -> tail -> blocks covers the whole file, a reader checks no more than what it reads,
no second file is needed, and to any reader of Arrow files the last batch is one of zero rows.
"""

import base64
import binascii
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.filesystem import RangeFile
from rollmill.tasks.store.shards.shard_names import ShardName

_END = struct.Struct("<i6s")
_MAGIC = b"ARROW1"
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
# Place in the vtable of a Footer (Arrow's File.fbs): two sizes, then version, schema and dictionaries.
_RECORD_BATCHES = 4 + 2 * 3


def read_shard_layout(source: pa.NativeFile, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Read from an Arrow IPC file's footer where its tail, the last record batch, begins, and where batches have metadata.

    pyarrow does not give the offsets of batches, so the footer's flatbuffer is parsed here; every offset is checked.

    Returns:
        Position of the tail's first byte; (first byte, byte after the last one) of the metadata of each batch before it.

    Raises:
        ValueError: it is no complete Arrow file.
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
        raise ValueError(f"its footer cannot be parsed: {error}") from error
    if not len(blocks):
        raise ValueError("it has no batches")
    tail, starts = int(blocks["offset"][-1]), blocks["offset"][:-1]
    ends = starts + blocks["metadata"][:-1]
    if not 0 < tail < begin or (starts < 0).any() or (starts > ends).any() or (ends > tail).any():
        raise ValueError("its footer has offsets outside the file")
    return tail, list(zip(starts.tolist(), ends.tolist(), strict=True))


def _record_batches(footer: bytes) -> np.ndarray:
    """Read where the record batches of an Arrow IPC file are from its footer, in the order they were written.

    Returns:
        Array of `_BLOCK` records: byte offset, and the bytes of metadata and of body.
    """
    (table,) = struct.unpack_from("<I", footer, 0)
    (back,) = struct.unpack_from("<i", footer, table)
    (field,) = struct.unpack_from("<H", footer, table - back + _RECORD_BATCHES)
    (ahead,) = struct.unpack_from("<I", footer, table + field)
    (count,) = struct.unpack_from("<I", footer, table + field + ahead)
    return np.frombuffer(footer, _BLOCK, count, table + field + ahead + 4)


# Bytes of a hashed block (128 KiB); xxhash releases the interpreter while it hashes 100 kB or more.
BLOCK_BYTES = 1 << 17

# A shard on S3 up to this size (8 MiB) is fetched in one request; of a larger one, at least 1 MiB in each request.
WHOLE_BYTES = 1 << 23
FETCHED_BYTES = 1 << 20

_HASHES, _HASHED_BYTES = b"block_xxh3_64", b"block_bytes"


def damage_error(where: str, what: str) -> ShardError:
    """Return the error to raise for a damaged shard; it names the file, the fault and the remedy."""
    return ShardError(
        f"{where} is damaged: {what}; restore this file from a copy (`rollmill verify` lists all that is wrong "
        "with a run)"
    )


def make_seal(content: memoryview) -> dict[bytes, bytes]:
    """Make the custom metadata of a shard's last batch: hashes of the blocks of `content`, the bytes before that batch."""
    hashes = np.array(_hashes(content, BLOCK_BYTES), "<u8").tobytes()
    return {_HASHED_BYTES: str(BLOCK_BYTES).encode(), _HASHES: base64.b64encode(hashes)}


def shard_digest(content: memoryview) -> str:
    """Compute the digest that a shard's name has, 16 hex digits: the hash of the shard's tail."""
    with pa.BufferReader(pa.py_buffer(content)) as source:
        return xxhash.xxh3_64_hexdigest(content[read_shard_layout(source, len(content))[0] :])


class CheckedShard:
    """An open shard whose bytes are checked against the hashes stored in it as they are read; errors name it as `where`.

    Raises:
        ShardError: its tail does not match `digest`, the 16 hex digits of its name; names the file and the remedy.
    """

    def __init__(self, source: pa.NativeFile, digest: str, where: str) -> None:
        self._where, size = where, source.size()
        if size <= WHOLE_BYTES and not isinstance(source, pa.BufferReader):
            source = pa.BufferReader(source.read_at(size, 0))
        try:
            self._tail_at, self._headers = read_shard_layout(source, size)
        except ValueError as error:
            raise damage_error(where, str(error)) from error
        self._origin, tail = source, source.read_at(size - self._tail_at, self._tail_at)
        if xxhash.xxh3_64_hexdigest(tail) != digest:
            raise damage_error(where, "its last bytes do not match the digest in its name")
        self._whole: pa.Buffer | None = None
        self._fetched = RangeFile(self._fetch, self._tail_at, tail, FETCHED_BYTES)
        if isinstance(source, pa.BufferReader):
            source.seek(0)
            self._whole = source.read_buffer(size)
        self._reader = pa.ipc.open_file(
            source if self._whole is not None else pa.PythonFile(self._fetched, mode="r")
        )
        self._block_bytes, self._hashes = self._read_seal()
        self._checked = set[int]()

    def schema(self) -> pa.Schema:
        """Return the schema of the shard's rows."""
        return self._reader.schema

    def read(self, fields: Sequence[int], chosen: Sequence[np.ndarray] | None = None) -> pa.Table:
        """Read some columns, given their indices in the schema; columns of a mapped shard are not copied.

        Checked are the blocks of what is read, of the batches' headers, and the first block. Damage elsewhere is not
        seen; see `check`.

        Args:
            fields: indices of the columns.
            chosen: for each record batch a mask of the rows to read; None: all rows. Of a fetched shard, batches without such a
                row are not fetched; of a mapped one, nothing of other rows is read but small columns.

        Raises:
            ShardError: some of it is damaged.
        """
        if self._whole is None:
            options = pa.ipc.IpcReadOptions(included_fields=list(fields))
            try:
                reader = pa.ipc.open_file(pa.PythonFile(self._fetched, mode="r"), options=options)
                if chosen is None:
                    return reader.read_all()
                batches = [
                    reader.get_batch(number).filter(pa.array(mask))
                    for number, mask in enumerate(chosen)
                    if mask.any()
                ]
                return pa.Table.from_batches(batches, schema=reader.schema)
            except (pa.ArrowException, OSError) as error:
                raise self._fetched.error or error from None
        self._check_ranges([(0, 1), *self._headers])
        # Asked for some fields only, Arrow would copy them.
        table = self._reader.read_all().select(list(fields))
        if chosen is not None:
            edges = np.flatnonzero(np.diff(np.concatenate([[False], *chosen, [False]]))).reshape(-1, 2)
            # Slices are views: Arrow does not touch what lies between them.
            table = pa.concat_tables([table.slice(0, 0), *(table.slice(a, b - a) for a, b in edges.tolist())])
        chunks = [chunk for column in table.columns for chunk in column.chunks if len(chunk)]
        # Values of lists are found by their offsets, which are checked first.
        self._check_ranges([each for chunk in chunks for each in self._find_ranges(chunk, 2)])
        self._check_ranges([each for chunk in chunks for each in self._find_ranges(chunk, None)])
        return table

    def check(self) -> None:
        """Check every byte of the shard; raises ShardError for damage."""
        n_blocks = -(-self._tail_at // self._block_bytes)
        if len(self._hashes) != n_blocks:
            raise damage_error(
                self._where, f"it has hashes of {len(self._hashes)} blocks, and {n_blocks} blocks"
            )
        for start in range(0, self._tail_at, WHOLE_BYTES):
            end = min(start + WHOLE_BYTES, self._tail_at)
            if self._whole is not None:
                self._check_ranges([(start, end)])
            else:
                self._fetch(start, end)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows of the shard, batch by batch, with every byte checked; raises ShardError for damage."""
        if self._whole is not None:
            self.check()
        for number in range(self._reader.num_record_batches - 1):
            try:
                yield self._reader.get_batch(number)
            except (pa.ArrowException, OSError) as error:
                raise self._fetched.error or error from None

    def _read_seal(self) -> tuple[int, Sequence[int]]:
        """Read the bytes per block, and the hash of each block, from the last batch's metadata."""
        try:
            last = self._reader.num_record_batches - 1
            metadata = self._reader.get_batch_with_custom_metadata(last).custom_metadata or {}
            hashes = np.frombuffer(base64.b64decode(metadata[_HASHES], validate=True), "<u8").tolist()
            return int(metadata[_HASHED_BYTES]), hashes
        except (KeyError, ValueError, binascii.Error) as error:
            raise damage_error(self._where, "it lacks the hashes of its blocks") from error

    def _find_ranges(self, chunk: pa.Array, n_buffers: int | None) -> list[tuple[int, int]]:
        """Return the byte ranges in the shard of the rows of an array, or of its first `n_buffers` buffers."""
        assert self._whole is not None
        base, size = self._whole.address, self._whole.size
        spans = [(each.address - base, each.size) if each else None for each in chunk.buffers()]
        if is_wide := pa.types.is_large_binary(chunk.type) or (
            pa.types.is_large_list(chunk.type) and pa.types.is_primitive(chunk.type.value_type)
        ):
            # All rows of these columns are large, and some may be read without the others.
            spans[1] = spans[1] and (spans[1][0] + 8 * chunk.offset, 8 * (len(chunk) + 1))
        spans = spans[:n_buffers]
        if is_wide and n_buffers is None and spans[-1]:
            ends = np.frombuffer(chunk.buffers()[1], np.int64)[[chunk.offset, chunk.offset + len(chunk)]]
            bits = 8 if pa.types.is_large_binary(chunk.type) else chunk.type.value_type.bit_width
            begin, end = int(ends[0]) * bits // 8, -(-int(ends[1]) * bits // 8)
            spans[-1] = spans[-1][0] + begin, end - begin
        ranges = [(start, start + length) for start, length in filter(None, spans) if length]
        return ranges if all(start >= 0 and end <= size for start, end in ranges) else [(0, size)]

    def _check_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        assert self._whole is not None
        whole, blocks = memoryview(self._whole), set[int]()
        for start, end in ranges:
            blocks.update(range(start // self._block_bytes, -(-min(end, self._tail_at) // self._block_bytes)))
        for block in sorted(blocks - self._checked):
            start = block * self._block_bytes
            self._check(start, whole[start : min(start + self._block_bytes, self._tail_at)])
            self._checked.add(block)

    def _fetch(self, start: int, end: int) -> tuple[int, bytes]:
        """Fetch the whole blocks around [start, end); returns the position of the first byte, and the checked bytes."""
        begin = start - start % self._block_bytes
        end = min(end + -end % self._block_bytes, self._tail_at)
        content = self._origin.read_at(end - begin, begin)
        self._check(begin, memoryview(content))
        return begin, content

    def _check(self, start: int, content: memoryview) -> None:
        """Compare consecutive blocks with their hashes, and raise ShardError if one differs; they begin at byte `start`."""
        for block, found in enumerate(_hashes(content, self._block_bytes), start // self._block_bytes):
            if block >= len(self._hashes) or found != self._hashes[block]:
                begin = block * self._block_bytes
                raise damage_error(
                    self._where, f"bytes {begin} to {begin + self._block_bytes} are not what was written"
                )


def open_shard(source: pa.NativeFile, key: str, where: str) -> CheckedShard:
    """Open a shard as a `CheckedShard`, with the digest that its key has.

    Raises:
        ShardError: its name has no digest, or its end does not match it.
    """
    name = ShardName.of(key)
    if name is None:
        raise ShardError(
            f"{where} is not named EPOCH-NUMBER-DIGEST.arrow, as Rollmill names shards; move it away"
        )
    return CheckedShard(source, name.digest, where)


def _hashes(content: memoryview, block_bytes: int) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(content[start : start + block_bytes])
        for start in range(0, len(content), block_bytes)
    ]
