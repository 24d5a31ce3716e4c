"""A rank's buckets, filled from the pieces of its weights while earlier ones are on the wire."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tasks.errors import SyncError
from tasks.sync.buckets import Bucket
from tasks.sync.link import as_bytes


class Piece(NamedTuple):
    """A part of the stream of all weights, where a rank has it.

    Attributes:
        offset: its first byte in the stream.
        data: contiguous, of any type and device.
        is_live: True when it lies still in memory until the transfer is over; else it is gone at the next piece.
    """

    offset: int
    data: torch.Tensor
    is_live: bool


class Spot(NamedTuple):
    """Where bytes belong: in the stream from `start` on, in a bucket from `at` on."""

    bucket: int
    start: int
    at: int


Keep = Callable[[Spot, torch.Tensor, bool], torch.Tensor]
"""Gives [n] uint8 that holds the bytes of [n] uint8 until the transfer is over; True when the given ones do."""


class Board:
    """Buckets that are filled, in their order; any thread may wait for one."""

    def __init__(self) -> None:
        self._filled: list[Sequence[torch.Tensor]] = []
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def publish(self, parts: Sequence[torch.Tensor]) -> None:
        """The next bucket is filled."""
        with self._changed:
            self._filled.append(parts)
            self._changed.notify_all()

    def fail(self, reason: Exception) -> None:
        """No other bucket will be filled."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def wait(self, number: int) -> Sequence[torch.Tensor]:
        """The parts of a bucket, one for each of its ranges, once they are there; SyncError when they never are."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or number < len(self._filled))
            if self._failure:
                raise SyncError(f"the trainer could not give its weights: {self._failure}")
            return self._filled[number]


class Filling:
    """Puts pieces into buckets.

    Args:
        buckets: of this rank.
        keep: how bytes are held until they are sent.
        board: told of each bucket that is filled.
    """

    def __init__(self, buckets: Sequence[Bucket], keep: Keep, board: Board) -> None:
        self._ranges = [
            (number, at, start, end)
            for number, bucket in enumerate(buckets)
            for at, (start, end) in zip(_places(bucket), bucket.ranges, strict=True)
        ]
        self._lengths = [len(bucket.ranges) for bucket in buckets]
        self._keep, self._board = keep, board
        self._next = 0  # range
        self._partly: list[torch.Tensor] = []  # of it, and as many bytes
        self._parts: list[torch.Tensor] = []  # of its bucket

    def add(self, piece: Piece) -> None:
        """Take what belongs to this rank of a piece; pieces come in the order of the stream.

        Raises:
            SyncError: bytes before it have not been given.
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
            is_whole = stop - first == end - start
            self._partly.append(self._keep(Spot(number, first, at + done), part, piece.is_live and is_whole))
            if stop == end:
                self._complete(number, end - start)

    def finish(self) -> None:
        """Check that everything was given.

        Raises:
            SyncError: some bytes were not.
        """
        if self._next < len(self._ranges):
            _, _, start, end = self._ranges[self._next]
            raise SyncError(
                f"expected the stream's bytes {start} to {end} from this rank, got none or not all of them"
            )

    def _complete(self, number: int, size: int) -> None:
        """A range has all its bytes; where several pieces have made it, they lie side by side."""
        first = self._partly[0]
        whole = first if len(self._partly) == 1 else first.as_strided((size,), (1,), first.storage_offset())
        self._parts.append(whole)
        self._partly, self._next = [], self._next + 1
        if len(self._parts) == self._lengths[number]:
            self._board.publish(self._parts)
            self._parts = []


class Staging:
    """Memory for buckets whose bytes do not lie still, or not where they are sent from; allocated once and kept.

    Args:
        device: where it is, a GPU or the host; page-locked for pieces that come from a GPU.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._sizes: list[int] = []
        self._memory: dict[int, torch.Tensor] = {}

    def keeper(self, buckets: Sequence[Bucket]) -> Keep:
        """Holds live bytes on its device as they are, and copies others."""
        sizes = [bucket.size_bytes for bucket in buckets]
        if sizes != self._sizes:
            self._sizes, self._memory = sizes, {}

        def keep(spot: Spot, data: torch.Tensor, is_live: bool) -> torch.Tensor:
            if is_live and data.device.type == self._device:
                return data
            if spot.bucket not in self._memory:
                self._memory[spot.bucket] = torch.empty(
                    sizes[spot.bucket],
                    dtype=torch.uint8,
                    device=self._device,
                    pin_memory=data.is_cuda and self._device == "cpu",
                )
            return self._memory[spot.bucket][spot.at : spot.at + len(data)].copy_(data)

        return keep


def keep_in(stream: torch.Tensor) -> Keep:
    """Holds bytes where they belong in the stream, [total] uint8."""
    return lambda spot, data, _: stream[spot.start : spot.start + len(data)].copy_(data)


def _places(bucket: Bucket) -> list[int]:
    """Where each range begins in its bucket."""
    places = [0]
    for start, end in bucket.ranges:
        places.append(places[-1] + end - start)
    return places[:-1]
