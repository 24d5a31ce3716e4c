"""Stand-in for torch's NCCL process group, which its CPU build lacks: pairs of processes over gloo, in host memory."""

import threading
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroupGloo


class GlooAsNccl:
    """What a link by NCCL calls of a process group; `connected` counts the groups of this process that have connected."""

    connected: ClassVar = threading.Semaphore(0)

    class Options:
        """Options with the time limit that a link sets."""

        _timeout = timedelta(seconds=60)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._given = store, rank, size, options._timeout
        self._group: Any = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect both ranks."""
        self._group = ProcessGroupGloo(*self._given)
        self.connected.release()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Send tensors to a rank; the work's `wait` has a time limit."""
        return self._group.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Receive tensors from a rank."""
        return self._group.recv(tensors, rank, tag)

    def abort(self) -> None:
        """End the group; a call under way in another thread raises RuntimeError."""
        if self._group is not None:
            self._group.abort()


def install() -> None:
    """Let links by NCCL of this process use the stand-in."""
    torch.distributed.ProcessGroupNCCL = GlooAsNccl  # type: ignore[attr-defined]
