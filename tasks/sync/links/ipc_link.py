"""Buckets of one GPU that trainer and server share, copied from process to process on the GPU by CUDA IPC; run on an H200.

The sender exports the memory of each bucket of its staging ring once; a TCP link carries the handles and the receiver's
confirmations. The first exchange, when the link opens, shows whether the two processes can share memory at all.

Handles are made and opened by `torch.multiprocessing.reductions`, which torch does not document; seen in torch 2.11 and 2.13. Where a torch
lacks them, the link fails and another transport takes its place.
"""

from collections.abc import Sequence
from functools import partial

import msgspec
import torch
from torch.multiprocessing import reductions

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links.link import Rendezvous
from rollmill.tasks.sync.links.tcp_link import TcpReceiver, TcpSender, exchange, receive_some

# Bytes of the message about a bucket; a handle with its counters has some 200.
_MESSAGE_BYTES = 1024
_TAKEN = b"\x01"


class ExportedBucket(msgspec.Struct, frozen=True, array_like=True):
    """How another process opens the memory of a bucket: its bytes, and what CUDA IPC needs."""

    size: int
    offset: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    must_sync: bool


def export_bucket(memory: torch.Tensor) -> ExportedBucket:
    """Export [n] uint8 of a GPU to another process.

    Raises:
        SyncError: this memory cannot be shared.
    """
    try:
        _, given = reductions.reduce_tensor(memory)
        _, _, _, offset, _, _, _, handle, storage_bytes, storage_offset, _, *counters = given
        return ExportedBucket(memory.numel(), offset, handle, storage_bytes, storage_offset, *counters)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise SyncError(f"the trainer's GPU memory cannot be shared: {error}") from error


def open_bucket(exported: ExportedBucket, device: torch.device) -> torch.Tensor:
    """Open another process's memory of the same GPU as [n] uint8.

    Raises:
        SyncError: CUDA refuses.
    """
    e = exported
    try:
        opened: torch.Tensor = reductions.rebuild_cuda_tensor(
            *(torch.Tensor, (e.size,), (1,), e.offset, torch.TypedStorage, torch.uint8),
            *(device.index or 0, e.handle, e.storage_bytes, e.storage_offset, False),
            *(e.counter, e.counter_offset, e.event, e.must_sync),
        )
    except (RuntimeError, TypeError, AttributeError) as error:
        raise SyncError(f"the trainer's GPU memory cannot be opened: {error}") from error
    return opened


def _synchronize(device: torch.device) -> None:
    """Wait until copies of this thread on a GPU are done: they are only queued, and another process uses the bytes next."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class IpcSender(TcpSender):
    """The trainer's end of a link by CUDA IPC; buckets are in staging memory of the GPU, from its first byte on."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous)
        # By address: memory of the ring is exported once, so that the server opens it once.
        self._exported: dict[int, bytes] = {}

    def open(self) -> None:
        """Wait until the receiver connects, and let it open memory of this GPU, as `SendingLink.open`."""
        super().open()
        self.send([torch.zeros(1, dtype=torch.uint8, device=self._rendezvous.device)])
        self._exported.clear()

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Let the receiver copy one bucket, whose parts are adjacent, as `SendingLink.send`; returns when it has."""
        size = sum(each.numel() for each in parts)
        # All of the bucket's memory, since later buckets in it may be larger.
        memory = parts[0].as_strided((parts[0].untyped_storage().nbytes(),), (1,), 0)
        _synchronize(memory.device)
        key = memory.data_ptr()
        if key not in self._exported:
            self._exported[key] = msgspec.msgpack.encode(export_bucket(memory))
        content = msgspec.msgpack.encode((size, self._exported[key]))
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        framed = bytearray(len(content).to_bytes(2) + content)
        message[: len(framed)] = torch.frombuffer(framed, dtype=torch.uint8)
        super().send([message])
        with self._in_use, self._raise_sync_errors("it took no bucket"):
            exchange(partial(receive_some, self._get_socket()), [memoryview(bytearray(len(_TAKEN)))])


class IpcReceiver(TcpReceiver):
    """The server's end of a link by CUDA IPC."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous)
        self._opened: dict[bytes, torch.Tensor] = {}

    def open(self) -> None:
        """Connect to the sender, and open memory of its GPU, as `ReceivingLink.open`."""
        super().open()
        self.receive([torch.empty(1, dtype=torch.uint8, device=self._rendezvous.device)])
        self._opened.clear()

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """Copy one bucket into parts of the same GPU, as `ReceivingLink.receive`."""
        message = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
        super().receive([message])
        content = bytes(message.numpy())
        try:
            length = int.from_bytes(content[:2])
            size, exported = msgspec.msgpack.decode(content[2 : 2 + length], type=tuple[int, bytes])
            if exported not in self._opened:
                bucket = msgspec.msgpack.decode(exported, type=ExportedBucket)
                self._opened[exported] = open_bucket(bucket, self._rendezvous.device)
        except msgspec.MsgspecError as error:
            raise SyncError(f"expected a bucket of the trainer's GPU, got {content[:32]!r}") from error
        sizes = [each.numel() for each in parts]
        if size != sum(sizes):
            raise SyncError(f"expected a bucket of {sum(sizes)} bytes, the trainer offers {size}")
        for part, data in zip(parts, self._opened[exported][:size].split(sizes), strict=True):
            part.copy_(data)
        _synchronize(self._rendezvous.device)
        with self._in_use, self._raise_sync_errors("the trainer took no byte"):
            self._get_socket().sendall(_TAKEN)
