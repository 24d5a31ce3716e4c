"""A large shard that lies elsewhere: few requests, and nobody sees a byte that was not checked."""

import io
import threading
from collections.abc import Callable

from tasks.errors import ShardError

FETCHED_BYTES = 1 << 20
"""A request asks for this much (1 MiB) at least."""


class FetchedShard(io.RawIOBase):
    """What Arrow reads of a shard that is not in memory.

    Arrow reads from several threads, each of which seeks and then reads: each has a place of its own.

    Args:
        fetch: gives checked bytes of [start, end), and more when whole blocks are more: their first place, and them.
        tail_at: where the tail begins.
        tail: the bytes from there to the end, checked.

    Attributes:
        error: what was wrong with a block: Arrow passes on the text of an error that it meets, but not the error.
    """

    def __init__(self, fetch: Callable[[int, int], tuple[int, bytes]], tail_at: int, tail: bytes) -> None:
        self._fetch, self._tail_at, self._tail = fetch, tail_at, tail
        self._places, self._lock = threading.local(), threading.Lock()
        self._start, self._content = 0, b""
        self.error: ShardError | None = None

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return getattr(self._places, "at", 0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._places.at = base + offset
        return base + offset

    def read(self, size: int = -1) -> bytes:
        start = self.tell()
        end = self._size if size < 0 else min(start + size, self._size)
        self._places.at = max(start, end)
        head = self._blocks(start, min(end, self._tail_at)) if start < min(end, self._tail_at) else b""
        return head + self._tail[max(start - self._tail_at, 0) : max(end - self._tail_at, 0)]

    @property
    def _size(self) -> int:
        return self._tail_at + len(self._tail)

    def _blocks(self, start: int, end: int) -> bytes:
        with self._lock:
            if not self._start <= start <= end <= self._start + len(self._content):
                ahead = min(max(end, start + FETCHED_BYTES), self._tail_at)
                try:
                    self._start, self._content = self._fetch(start, ahead)
                except ShardError as error:
                    self.error = error
                    raise
            return self._content[start - self._start : end - self._start]
