"""A link of torch's gloo: one process group of two; no global group is touched.

Gloo ends a wait only by its own timeout, which closes the connection: a link that is dropped while somebody waits is dead
when that is over. It ends the process when bytes are lost or changed on the way.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from tasks.errors import SyncError
from tasks.sync.link import Meeting, Stalls, all_cores, packed, scatter

SENDER, RECEIVER = 0, 1


def open_pair(store: Store, name: str, rank: int, address: str, timeout_s: float) -> ProcessGroupGloo:
    """Join the other end under a name; returns when both are there, RuntimeError after `timeout_s` seconds."""
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    with all_cores():
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        return ProcessGroupGloo(PrefixStore(name, store.clone()), rank, 2, options)


class _Pair:
    """What both ends have."""

    rank: int

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self.stalls = meeting, Stalls()
        self._group: ProcessGroupGloo | None = None

    def open(self) -> None:
        """See the seam."""
        meeting = self._meeting
        try:
            self._group = open_pair(
                meeting.store, meeting.name, self.rank, meeting.address, meeting.timeout_s
            )
        except RuntimeError as error:
            raise SyncError(
                f"the other end of {meeting.name} did not come in {meeting.timeout_s:g} s (sync.timeout_s): {error}"
            ) from error

    def close(self) -> None:
        """See the seam."""
        self._group = None

    def _opened(self) -> ProcessGroupGloo:
        if self._group is None:
            raise SyncError("the link is closed")
        return self._group


class GlooSender(_Pair):
    """The trainer's end."""

    rank = SENDER

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """See the seam."""
        limit = timedelta(seconds=self._meeting.stall_timeout_s)
        try:
            self._opened().send([packed(parts)], RECEIVER, 0).wait(limit)
        except RuntimeError as error:
            raise SyncError(f"the bucket was not taken: {error}") from error


class GlooReceiver(_Pair):
    """The server's end."""

    rank = RECEIVER

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """See the seam."""
        data = (
            torch.empty(sum(each.numel() for each in parts), dtype=torch.uint8)
            if len(parts) > 1
            else parts[0]
        )
        limit = timedelta(seconds=self._meeting.stall_timeout_s)
        try:
            self._opened().recv([data], SENDER, 0).wait(limit)
        except RuntimeError as error:
            raise SyncError(f"the bucket did not come: {error}") from error
        if len(parts) > 1:
            scatter(data, parts)
