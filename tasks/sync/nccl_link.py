"""A link of NCCL between a GPU of the trainer's and one of a server's; no global group is touched.

Both ends of a pair must be different GPUs: NCCL has no two ranks on one.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore

from tasks.errors import SyncError
from tasks.sync.link import Meeting, Stalls, packed, scatter

_SENDER, _RECEIVER = 0, 1


class _Pair:
    """What both ends have."""

    rank: int

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self.stalls = meeting, Stalls()
        self._group: Any = None

    def open(self) -> None:
        """See the seam."""
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise SyncError("this torch has no NCCL: set sync.transport=tcp") from error
        meeting, options = self._meeting, ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=meeting.timeout_s)
        try:
            store = PrefixStore(meeting.name, meeting.store.clone())
            self._group = ProcessGroupNCCL(store, self.rank, 2, options)
            self._group.eager_connect_single_device(self._device)
        except RuntimeError as error:
            raise SyncError(
                f"the other end of {meeting.name} did not come in {meeting.timeout_s:g} s (sync.timeout_s): {error}"
            ) from error

    def close(self) -> None:
        """See the seam."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _exchange(self, call: str, data: torch.Tensor, other: int) -> None:
        """One send or receive; a wait with a limit blocks this thread, and aborts when it passes."""
        if self._group is None:
            raise SyncError("the link is closed")
        try:
            getattr(self._group, call)([data], other, 0).wait(
                timedelta(seconds=self._meeting.stall_timeout_s)
            )
        except RuntimeError as error:
            raise SyncError(f"{call} of {data.numel()} bytes by NCCL failed: {error}") from error


class NcclSender(_Pair):
    """The trainer's end."""

    rank = _SENDER

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """See the seam; parts lie on the GPU."""
        self._exchange("send", packed(parts), _RECEIVER)


class NcclReceiver(_Pair):
    """The server's end."""

    rank = _RECEIVER

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """See the seam; parts may lie in the host's memory or on the GPU."""
        data = torch.empty(sum(each.numel() for each in parts), dtype=torch.uint8, device=self._device)
        self._exchange("recv", data, _SENDER)
        scatter(data, parts)
