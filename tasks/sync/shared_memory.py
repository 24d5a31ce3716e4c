"""One memory of a machine that all trainer ranks write the stream of weights to, and all servers read it from.

It has no name in the file system: others open it through its owner's entry in /proc, and it is gone with the last who has
it. What tells servers that a bucket has been written is a TCP link on which the bucket's bytes do not travel.
"""

import mmap
import os
import warnings
from collections.abc import Sequence

import torch

from tasks.errors import SyncError
from tasks.sync.tcp_link import TcpReceiver, TcpSender

_REMEDY = "set sync.transport=tcp"


class SharedMemory:
    """The owner's.

    Args:
        size_bytes: of the stream.

    Attributes:
        path: where others on this machine open it, as long as this process lives.
        stream: [size] uint8.
    """

    def __init__(self, size_bytes: int) -> None:
        self._descriptor = os.memfd_create("rollmill-weights")
        os.ftruncate(self._descriptor, size_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.stream = _mapped(self._descriptor, size_bytes, is_writable=True)

    def close(self) -> None:
        """Let nobody else open it; whoever has, keeps it."""
        os.close(self._descriptor)


def open_shared(path: str, size_bytes: int, *, is_writable: bool) -> torch.Tensor:
    """[size] uint8 of another process's memory; writing to it without `is_writable` ends the process.

    Raises:
        SyncError: it cannot be opened from here, or is of another size.
    """
    try:
        descriptor = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
    except OSError as error:
        raise SyncError(
            f"the trainer's memory {path} cannot be opened on this machine by this user: {error}; {_REMEDY}"
        ) from error
    try:
        if (found := os.fstat(descriptor).st_size) != size_bytes:
            raise SyncError(
                f"expected {size_bytes} bytes at {path}, found {found}: the trainer has loaded another model"
            )
        return _mapped(descriptor, size_bytes, is_writable)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size_bytes: int, is_writable: bool) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
    memory = mmap.mmap(descriptor, size_bytes, access=access)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


class SharedSender(TcpSender):
    """Tells that a bucket has been written."""

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """See the seam."""
        super().send([])


class SharedReceiver(TcpReceiver):
    """Hears that a bucket has been written."""

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """See the seam; the parts lie in the shared memory."""
        super().receive([])
