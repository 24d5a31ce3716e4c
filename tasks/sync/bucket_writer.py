"""Writes the weights of a trainer rank into buckets, while earlier buckets are being sent."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import NamedTuple

import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.sync.transfer_plan import STREAMS, Bucket


class Piece(NamedTuple):
    """A contiguous part of the stream of all weights' bytes, in the memory of one trainer rank.

    Attributes:
        offset: position in the stream of the piece's first byte.
        data: a contiguous tensor, of any type and device.
        is_live: True if the data stays in memory until the transfer ends; else it is overwritten after the next piece.
    """

    offset: int
    data: torch.Tensor
    is_live: bool


class BucketOffset(NamedTuple):
    """Position of bytes: byte `start` of the stream, which is byte `at` of bucket number `bucket`."""

    bucket: int
    start: int
    at: int


CopyToBucket = Callable[[BucketOffset, torch.Tensor, bool], torch.Tensor]
"""Returns [n] uint8 that keeps the given bytes until every server has taken the bucket; the flag is `Piece.is_live`."""


ReadyBucket = Future[Sequence[torch.Tensor]]
"""A bucket's parts, one for each of its ranges, once all its bytes are written; any thread may wait for it."""


class BucketWriter:
    """Writes pieces of the stream of weights into the buckets of one rank.

    Args:
        buckets: the buckets that this rank sends.
        keep: called with bytes and their position; keeps them until they are sent.
        ready: one future for each bucket, which gets the bucket's parts once all are written.
        before_ready: called with a bucket's number and parts before they are published.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        keep: CopyToBucket,
        ready: Sequence[ReadyBucket],
        before_ready: Callable[[int, Sequence[torch.Tensor]], None] = lambda _number, _parts: None,
    ) -> None:
        self._ranges = [
            (number, at, start, end)
            for number, bucket in enumerate(buckets)
            for at, (start, end) in zip(
                accumulate((end - start for start, end in bucket.ranges), initial=0),
                bucket.ranges,
                strict=False,
            )
        ]
        self._lengths = [len(bucket.ranges) for bucket in buckets]
        self._keep, self._ready, self._before_ready = keep, ready, before_ready
        # Number of the range that is being written, what is written of it, and the complete parts of its bucket.
        self._next = 0
        self._partly: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []

    def add(self, piece: Piece) -> None:
        """Write the part of a piece that this rank sends; pieces come in the order of the stream.

        Raises:
            SyncError: the piece leaves a gap.
        """
        data = as_bytes(piece.data.detach())
        while self._next < len(self._ranges):
            number, at, start, end = self._ranges[self._next]
            done = sum(map(len, self._partly))
            first, stop = start + done, min(end, piece.offset + len(data))
            if first >= stop:
                return
            if first < piece.offset:
                raise SyncError(
                    f"expected the stream's bytes from {first} on, got them from {piece.offset} on"
                )
            part = data[first - piece.offset : stop - piece.offset]
            # A range in several pieces is copied, live or not: its parts must be adjacent to become one view.
            is_whole = stop - first == end - start
            self._partly.append(
                self._keep(BucketOffset(number, first, at + done), part, piece.is_live and is_whole)
            )
            if stop == end:
                self._complete(number, end - start)

    def finish(self) -> None:
        """Check that all bytes of all buckets were written.

        Raises:
            SyncError: some are missing.
        """
        if self._next < len(self._ranges):
            _, _, start, end = self._ranges[self._next]
            raise SyncError(
                f"expected the stream's bytes {start} to {end} from this rank, got none or not all of them"
            )

    def _complete(self, number: int, size: int) -> None:
        """End the range that is being written, of `size` bytes; publish bucket `number` if that was its last range."""
        # Several pieces of a range are adjacent in staging memory, so one view covers them.
        first = self._partly[0]
        whole = first if len(self._partly) == 1 else first.as_strided((size,), (1,), first.storage_offset())
        self._parts.append(whole)
        self._partly, self._next = [], self._next + 1
        if len(self._parts) == self._lengths[number]:
            self._before_ready(number, self._parts)
            self._ready[number].set_result(self._parts)
            self._parts = []


STAGING_BUCKETS = 2 * STREAMS
"""Buckets of staging memory: each of a worker's links sends one while the next one for it is written."""

AwaitTaken = Callable[[Collection[int]], int]
"""Waits until all servers have taken one of the buckets with the given numbers; returns its number."""


class StagingMemory:
    """A ring of STAGING_BUCKETS buckets of one device, for weights that are overwritten before they are sent, or are elsewhere.

    A bucket is written again once every server has taken it.

    Args:
        device: a CPU or a GPU. Host memory is page-locked for pieces that come from a GPU.
        copies_all: True if all pieces are copied, so that each bucket is in one place.
    """

    def __init__(self, device: torch.device, *, copies_all: bool = False) -> None:
        self._device, self._copies_all = device, copies_all
        self._free: list[torch.Tensor] = []
        self._used: dict[int, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Size of the memory in bytes, which is kept between transfers."""
        return sum(each.numel() for each in (*self._free, *self._used.values()))

    def keeper(self, buckets: Sequence[Bucket], await_taken: AwaitTaken) -> CopyToBucket:
        """Return a function that copies weights into this memory, or returns them as they are if they are live and on this device.

        The function waits while all memory has buckets that a server has not taken. Call this between two transfers.
        """
        size = max((bucket.size_bytes for bucket in buckets), default=0)
        # Memory is kept between transfers: new memory for each of them takes four times as long.
        self._free = [each for each in (*self._free, *self._used.values()) if each.numel() == size]
        self._used = {}

        def keep(offset: BucketOffset, data: torch.Tensor, is_live: bool) -> torch.Tensor:
            if is_live and not self._copies_all and data.device.type == self._device.type:
                return data
            if offset.bucket not in self._used:
                if len(self._used) == STAGING_BUCKETS:
                    self._free.append(self._used.pop(await_taken(tuple(self._used))))
                # CUDA copies into ordinary host memory through a page-locked buffer, so twice.
                is_pinned = data.is_cuda and self._device.type == "cpu"
                self._used[offset.bucket] = (
                    self._free.pop()
                    if self._free
                    else torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=is_pinned)
                )
            return self._used[offset.bucket][offset.at : offset.at + len(data)].copy_(data)

        return keep


def copy_into_stream(stream: torch.Tensor) -> CopyToBucket:
    """Return a function that copies bytes to their position in `stream`, [total] uint8."""
    return lambda offset, data, _: stream[offset.start : offset.start + len(data)].copy_(data)
