"""Shared memory of one machine: all trainer ranks write the stream of weights to it, all servers read it.

Others open it through its creator's entry in /proc, and it is freed when the last process closes it. A TCP link, without
the bytes, signals that a bucket is written.
"""

import mmap
import os
import warnings
from collections.abc import Sequence

import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links.tcp_link import TcpReceiver, TcpSender

_REMEDY = "set sync.transport=tcp"


class SharedMemory:
    """Shared-memory segment that the sender creates; receivers open it by `path`.

    Args:
        size_bytes: size of the stream.

    Attributes:
        path: file path at which other processes of this machine open the segment while this process lives.
        stream: [size] uint8, writable.
    """

    def __init__(self, size_bytes: int) -> None:
        # Without a name in the file system, nothing is left behind when the processes are killed.
        self._descriptor = os.memfd_create("rollmill-weights")
        os.ftruncate(self._descriptor, size_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.stream = _map_memory(self._descriptor, size_bytes, is_writable=True)

    def close(self) -> None:
        """Close the segment; processes that have opened it keep it."""
        os.close(self._descriptor)


def open_shared(path: str, size_bytes: int, *, is_writable: bool) -> torch.Tensor:
    """Map another process's segment as [size] uint8; writing to it without `is_writable` ends the process.

    Raises:
        SyncError: it cannot be opened from here, or has another size.
    """
    try:
        descriptor = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
    except OSError as error:
        raise SyncError(
            f"the memory {path} cannot be opened on this machine by this user: {error}; {_REMEDY}"
        ) from error
    try:
        # A segment of another size is that of another model, whose bytes would pass for these weights.
        if (found := os.fstat(descriptor).st_size) != size_bytes:
            raise SyncError(f"expected {size_bytes} bytes at {path}, found {found}: they are another model's")
        return _map_memory(descriptor, size_bytes, is_writable)
    finally:
        os.close(descriptor)


def _map_memory(descriptor: int, size_bytes: int, is_writable: bool) -> torch.Tensor:
    # mmap refuses a length of 0.
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
    memory = mmap.mmap(descriptor, size_bytes, access=access)
    with warnings.catch_warnings():
        # torch warns of every read-only buffer, which receivers only read.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


class SharedSender(TcpSender):
    """The trainer's end of a link by shared memory, which only signals that a bucket is written."""

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Signal that a bucket is written; `parts` are in the shared memory and are not sent."""
        super().send([])


class SharedReceiver(TcpReceiver):
    """The server's end of a link by shared memory, which only waits for the signal that a bucket is written."""

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """Wait until a bucket is written; `parts` are in the shared memory, so nothing is copied."""
        super().receive([])
