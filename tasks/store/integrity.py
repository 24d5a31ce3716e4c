"""Shards that show damage: a hash covers every byte, and the chain of hashes begins in the file's name.

    | blocks of 128 KiB: magic, schema, batches ... | last batch, of zero rows | footer |
                                                    '------------ the tail ------------'

The last batch carries the XXH3-64 of each block before it in its custom metadata; the shard's name carries the
XXH3-64 of the tail. So name -> tail -> blocks covers the whole file, a reader checks no more than what it reads,
nothing lies beside the shard, and to any reader of Arrow files the last batch is one of zero rows.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from tasks.errors import ShardError
from tasks.store.fetched import FetchedShard
from tasks.store.footer import places_of
from tasks.store.names import ShardName

BLOCK_BYTES = 1 << 17
"""A piece of a shard with a hash of its own; xxhash lets other threads run while it hashes 100 kB or more."""

WHOLE_BYTES = 1 << 23
"""A shard up to this size (8 MiB) that is not in memory, mapped ones are, is fetched in one request."""

_HASHES, _HASHED_BYTES = b"block_xxh3_64", b"block_bytes"


def damaged(where: str, what: str) -> ShardError:
    """The error of a shard that is not what was written."""
    return ShardError(
        f"{where} is damaged: {what}; restore this file from a copy (`rollmill verify` lists all that is wrong "
        "with a run)"
    )


def seal(content: memoryview) -> dict[bytes, bytes]:
    """Custom metadata for the last batch of a shard that begins with `content`: the hash of each block of it."""
    hashes = np.array(_hashes(content, BLOCK_BYTES), "<u8").tobytes()
    return {_HASHED_BYTES: str(BLOCK_BYTES).encode(), _HASHES: base64.b64encode(hashes)}


def digest_of(content: memoryview) -> str:
    """Digest for the name of a whole shard: 16 hex digits."""
    with pa.BufferReader(pa.py_buffer(content)) as source:
        return xxhash.xxh3_64_hexdigest(content[places_of(source, len(content)).tail :])


class CheckedShard:
    """A shard that is checked as it is read.

    Args:
        source: the open file.
        digest: what its name says.
        where: its path, for errors.

    Raises:
        ShardError: its end is not what its name says; names the file, and says what to do.
    """

    def __init__(self, source: pa.NativeFile, digest: str, where: str) -> None:
        self._where, size = where, source.size()
        if size <= WHOLE_BYTES and not isinstance(source, pa.BufferReader):
            source = pa.BufferReader(source.read_at(size, 0))
        try:
            places = places_of(source, size)
        except ValueError as error:
            raise damaged(where, str(error)) from error
        self._origin, self._headers, self._tail_at = source, places.headers, places.tail
        tail = source.read_at(size - places.tail, places.tail)
        if xxhash.xxh3_64_hexdigest(tail) != digest:
            raise damaged(where, "its end is not what its name says")
        self._whole: pa.Buffer | None = None
        self._fetched = FetchedShard(self._fetch, places.tail, tail)
        if isinstance(source, pa.BufferReader):
            source.seek(0)
            self._whole = source.read_buffer(size)
        self._reader = pa.ipc.open_file(
            source if self._whole is not None else pa.PythonFile(self._fetched, mode="r")
        )
        self._block_bytes, self._hashes = self._sealed()

    def schema(self) -> pa.Schema:
        """The schema that its footer tells."""
        return self._reader.schema

    def read(self, fields: Sequence[int]) -> pa.Table:
        """Some columns, by their places in the schema; of a shard in memory nothing is copied.

        What is checked is what is read: the blocks under these columns and under the messages that say where they
        are, and the first block. Damage elsewhere goes unseen; see `check`.

        Raises:
            ShardError: some of it is damaged.
        """
        if self._whole is None:
            return self._read_fetched(fields)
        self._check_ranges([(0, 1), *self._headers])
        # Asked for some fields only, Arrow would copy them.
        table = self._reader.read_all().select(list(fields))
        self._check_ranges(self._ranges_of(table))
        return table

    def check(self) -> None:
        """Check every byte.

        Raises:
            ShardError: some of it is damaged.
        """
        n_blocks = -(-self._tail_at // self._block_bytes)
        if len(self._hashes) != n_blocks:
            raise damaged(self._where, f"it has hashes of {len(self._hashes)} blocks, and {n_blocks} blocks")
        for start in range(0, self._tail_at, WHOLE_BYTES):
            end = min(start + WHOLE_BYTES, self._tail_at)
            if self._whole is not None:
                self._check_ranges([(start, end)])
            else:
                self._fetch(start, end)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All its rows, piece by piece; every byte of them is checked.

        Raises:
            ShardError: some of it is damaged.
        """
        if self._whole is not None:
            self.check()
        for number in range(self._reader.num_record_batches - 1):
            try:
                yield self._reader.get_batch(number)
            except (pa.ArrowException, OSError) as error:
                raise self._fetched.error or error from None

    def _read_fetched(self, fields: Sequence[int]) -> pa.Table:
        options = pa.ipc.IpcReadOptions(included_fields=list(fields))
        try:
            return pa.ipc.open_file(pa.PythonFile(self._fetched, mode="r"), options=options).read_all()
        except (pa.ArrowException, OSError) as error:
            raise self._fetched.error or error from None

    def _sealed(self) -> tuple[int, Sequence[int]]:
        """Bytes of a block, and the hash of each."""
        try:
            last = self._reader.num_record_batches - 1
            told = self._reader.get_batch_with_custom_metadata(last).custom_metadata or {}
            hashes = np.frombuffer(base64.b64decode(told[_HASHES], validate=True), "<u8").tolist()
            return int(told[_HASHED_BYTES]), hashes
        except (KeyError, ValueError, binascii.Error) as error:
            raise damaged(self._where, "it lacks the hashes of its blocks") from error

    def _ranges_of(self, table: pa.Table) -> list[tuple[int, int]]:
        """Where the buffers of a table lie; where Arrow had to copy one, that cannot be seen, and it is everywhere."""
        assert self._whole is not None
        base, size = self._whole.address, self._whole.size
        ranges = [
            (buffer.address - base, buffer.address - base + buffer.size)
            for column in table.columns
            for chunk in column.chunks
            if len(chunk)
            for buffer in chunk.buffers()
            if buffer is not None and buffer.size
        ]
        return ranges if all(start >= 0 and end <= size for start, end in ranges) else [(0, size)]

    def _check_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        assert self._whole is not None
        whole, blocks = memoryview(self._whole), set[int]()
        for start, end in ranges:
            blocks.update(range(start // self._block_bytes, -(-min(end, self._tail_at) // self._block_bytes)))
        for block in sorted(blocks):
            start = block * self._block_bytes
            self._check(start, whole[start : min(start + self._block_bytes, self._tail_at)])

    def _fetch(self, start: int, end: int) -> tuple[int, bytes]:
        """The whole blocks that [start, end) lies in: where they begin, and their checked bytes."""
        begin = start - start % self._block_bytes
        end = min(end + -end % self._block_bytes, self._tail_at)
        content = self._origin.read_at(end - begin, begin)
        self._check(begin, memoryview(content))
        return begin, content

    def _check(self, start: int, content: memoryview) -> None:
        """Check consecutive blocks, the first of which begins at `start`."""
        for block, found in enumerate(_hashes(content, self._block_bytes), start // self._block_bytes):
            if block >= len(self._hashes) or found != self._hashes[block]:
                begin = block * self._block_bytes
                raise damaged(
                    self._where, f"bytes {begin} to {begin + self._block_bytes} are not what was written"
                )


class UncheckedShard:
    """A shard of schema version 1, which has no hashes: what it holds can be believed or not."""

    def __init__(self, source: pa.NativeFile) -> None:
        self._source = source

    def schema(self) -> pa.Schema:
        """The schema that its footer tells."""
        return pa.ipc.open_file(self._source).schema

    def read(self, fields: Sequence[int]) -> pa.Table:
        """Some columns, by their places in the schema."""
        return pa.ipc.open_file(self._source).read_all().select(list(fields))

    def check(self) -> None:
        """Nothing can be checked."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All its rows, piece by piece."""
        reader = pa.ipc.open_file(self._source)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def open_shard(source: pa.NativeFile, key: str, where: str) -> CheckedShard | UncheckedShard:
    """A shard to read, checked if its name has a digest; `where` is its path, for errors.

    Raises:
        ShardError: its end is not what its name says.
    """
    name = ShardName.of(key)
    return CheckedShard(source, name.digest, where) if name and name.digest else UncheckedShard(source)


def _hashes(content: memoryview, block_bytes: int) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(content[start : start + block_bytes])
        for start in range(0, len(content), block_bytes)
    ]
