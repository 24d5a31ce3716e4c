"""Memory into which a server's worker receives the stream of weights: all of it, or tensor by tensor."""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.ranges import Range, overlap
from rollmill.tasks.sync.transfer_plan import TensorPlan, TransferPlan


class StreamMemory(Protocol):
    """Interface of the memory for received bytes; several threads use it at a time, each for its own ranges."""

    def views(self, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """Return memory for the bytes of ranges of the stream, as [n] uint8 each, in order; may wait for room."""

    def mark_arrived(self, ranges: Sequence[Range]) -> None:
        """Record that the bytes of ranges are in the memory."""

    def fail(self, error: SyncError) -> None:
        """End all waits: some bytes will not arrive."""


class WholeStream:
    """A buffer, [n] uint8, that holds the whole stream."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def views(self, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """Return views of the buffer, as `StreamMemory.views`."""
        return [self._buffer[start:end] for start, end in ranges]

    def mark_arrived(self, ranges: Sequence[Range]) -> None:
        """Do nothing: the tensors are used once all have arrived."""

    def fail(self, error: SyncError) -> None:
        """Do nothing: no thread waits for room."""


def view_tensor(plan: TensorPlan, data: torch.Tensor) -> torch.Tensor:
    """View bytes, [n] uint8, as the tensor of a plan."""
    return data.view(getattr(torch, plan.dtype)).view(plan.shape)


WAITING_BUCKETS = 2
"""Complete tensors wait to be taken up to this many buckets; then the links wait, so this is the double buffer."""


class ArrivingTensors:
    """The tensors of a plan, each in separate memory from its first byte until the taker drops it.

    Args:
        plan: the transfer plan.
        device: on which the tensors are.
    """

    def __init__(self, plan: TransferPlan, device: torch.device) -> None:
        self._tensors, self._device = plan.tensors, device
        self._starts = [each.offset for each in plan.tensors]
        self._missing = [each.size_bytes for each in plan.tensors]
        self._data: dict[int, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._error: SyncError | None = None
        # Numbers of the tensors that wait to be taken, and their bytes.
        self._complete = deque(number for number, each in enumerate(self._missing) if not each)
        self._waiting_bytes = 0
        self._most_bytes = WAITING_BUCKETS * plan.bucket_bytes

    def views(self, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """Return views of the tensors, as `StreamMemory.views`; waits while too many complete ones are not taken.

        Raises:
            SyncError: the reception has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._waiting_bytes <= self._most_bytes)
            if self._error:
                raise self._error
            return [self._memory(number)[first:end] for number, (first, end) in self._cut(ranges)]

    def mark_arrived(self, ranges: Sequence[Range]) -> None:
        """Record arrived bytes; tensors that are complete can be taken."""
        with self._changed:
            for number, (first, end) in self._cut(ranges):
                self._missing[number] -= end - first
                if not self._missing[number]:
                    self._complete.append(number)
                    self._waiting_bytes += self._tensors[number].size_bytes
            self._changed.notify_all()

    def take(self) -> tuple[str, torch.Tensor]:
        """Wait for the next complete tensor; returns its name and the tensor.

        Raises:
            SyncError: the reception failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._complete)
            if self._error:
                raise self._error
            number = self._complete.popleft()
            self._waiting_bytes -= self._tensors[number].size_bytes
            self._changed.notify_all()
            data = self._memory(number)
            del self._data[number]
        if data.is_cuda:
            # It was allocated in the thread of a link, perhaps for another stream than this thread's.
            data.record_stream(torch.cuda.current_stream(data.device))
        return self._tensors[number].name, view_tensor(self._tensors[number], data)

    def fail(self, error: SyncError) -> None:
        """End all waits with an error, the first one if there are several."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _memory(self, number: int) -> torch.Tensor:
        if number not in self._data:
            size = self._tensors[number].size_bytes
            self._data[number] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._data[number]

    def _cut(self, ranges: Sequence[Range]) -> Iterator[tuple[int, Range]]:
        """Yield (number, range in it) of each tensor that ranges of the stream have bytes of, in their order."""
        for start, end in ranges:
            number = bisect_right(self._starts, start) - 1
            while number < len(self._tensors) and self._starts[number] < end:
                offset, size = self._starts[number], self._tensors[number].size_bytes
                first, stop = overlap((start, end), (offset, offset + size))
                if first < stop:
                    yield number, (first - offset, stop - offset)
                number += 1
