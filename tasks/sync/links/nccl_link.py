"""A link between a GPU of the trainer and one of a server, by NCCL, without a global process group; not run on a GPU.

Both ends must be different GPUs: NCCL supports one rank for each.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links.link import Rendezvous, Stalls

_SENDER, _RECEIVER = 0, 1


def set_timeout(options: Any, limit: timedelta) -> None:
    """Limit how long a process group with these options waits for its other rank.

    This is the links' only use of torch's private API, `Backend.Options._timeout`, seen in torch 2.13.

    Raises:
        SyncError: the installed torch lacks it.
    """
    # Without the check, torch's AttributeError would end the thread of the link and no one would see it.
    if not hasattr(options, "_timeout"):
        raise SyncError(
            f"torch {torch.__version__} has no ProcessGroupNCCL.Options._timeout, which 2.13 has: set sync.transport=tcp"
        )
    # torch's public time limits are those of the global process group, which the links do not use.
    options._timeout = limit


ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable of torch: what the watchdog of a new process group does about an error; 0: nothing, 3: it ends the process."""
_opening = threading.Lock()


@contextmanager
def spare_process() -> Iterator[None]:
    """Keep the watchdogs of process groups made in the block from ending the process when NCCL fails.

    A link that fails raises an error, and the run continues by another transport. By default the watchdog would end the trainer's rank
    or vLLM's engine first. Process groups made before, such as DeepSpeed's, keep their behaviour.
    """
    # torch reads the variable when it makes a process group, and links are opened by several threads.
    with _opening:
        before = os.environ.get(ERROR_HANDLING)
        os.environ[ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            del os.environ[ERROR_HANDLING]
            if before is not None:
                os.environ[ERROR_HANDLING] = before


class _NcclPair:
    """Base of both ends of a link: an NCCL process group of two ranks, sender and receiver."""

    rank: int

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous, self.stalls = rendezvous, Stalls()
        self._group: Any = None

    def open(self) -> None:
        """Create the process group; raises SyncError without NCCL, or if the other end does not connect within `timeout_s`."""
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise SyncError("this torch has no NCCL: set sync.transport=tcp") from error
        rendezvous, options = self._rendezvous, ProcessGroupNCCL.Options()
        set_timeout(options, timedelta(seconds=rendezvous.timeout_s))
        try:
            # A connection to the store serves one call at a time, and other links wait on theirs meanwhile.
            store = PrefixStore(rendezvous.name, rendezvous.store.clone())
            with spare_process():
                self._group = ProcessGroupNCCL(store, self.rank, 2, options)
            # Connects now: by default NCCL connects at the first transfer, which would count as a stall. The device is given, since
            # the current one is 0 in every new thread.
            self._group.eager_connect_single_device(rendezvous.device)
        except RuntimeError as error:
            raise SyncError(
                f"the other end of {rendezvous.name} did not come in {rendezvous.timeout_s:g} s (sync.timeout_s): {error}"
            ) from error

    def close(self) -> None:
        """Abort the process group; a call under way in another thread raises SyncError."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _exchange(self, call: str, data: torch.Tensor, other: int) -> None:
        """Call the process group's `send` or `recv` with `data`; raises SyncError if it fails or passes `stall_timeout_s`."""
        if self._group is None:
            raise SyncError("the link is closed")
        try:
            getattr(self._group, call)([data], other, 0).wait(
                timedelta(seconds=self._rendezvous.stall_timeout_s)
            )
        except RuntimeError as error:
            raise SyncError(f"{call} of {data.numel()} bytes by NCCL failed: {error}") from error


class NcclSender(_NcclPair):
    """The trainer's end of a link by NCCL."""

    rank = _SENDER

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send one bucket as a single tensor, as `SendingLink.send`; the parts are on the GPU or in host memory."""
        data = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        self._exchange("send", data.to(self._rendezvous.device), _RECEIVER)


class NcclReceiver(_NcclPair):
    """The server's end of a link by NCCL."""

    rank = _RECEIVER

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """Receive one bucket as `ReceivingLink.receive`; the parts are in host memory or on the GPU."""
        device = self._rendezvous.device
        if len(parts) == 1 and parts[0].device == device:
            self._exchange("recv", parts[0], _SENDER)
            return
        data = torch.empty(sum(each.numel() for each in parts), dtype=torch.uint8, device=device)
        self._exchange("recv", data, _SENDER)
        for part, received in zip(parts, data.split([each.numel() for each in parts]), strict=True):
            part.copy_(received)
        if data.is_cuda:
            # Copies between places of one GPU are only queued; another thread uses the parts next.
            torch.cuda.current_stream(data.device).synchronize()
