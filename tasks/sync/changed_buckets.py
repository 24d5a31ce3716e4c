"""Buckets that travel as changes: the sender's copy of what it sent last, and how one arrives at a server that holds as much.

A snapshot is the bytes of all weights in one transfer; its name is given by the flow. A server that holds the snapshot before gets
changes, any other the whole. Each bucket has a head, since a rank that lacks the server's snapshot sends it whole.
"""

import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.bucket_writer import AwaitTaken, ReadyBucket
from rollmill.tasks.sync.byte_changes import ByteRun, Bytes, apply_changes, encode_changes
from rollmill.tasks.sync.links.link import ReceivingLink, use_all_cores
from rollmill.tasks.sync.transfer_plan import BUCKET_BYTES, ITEM_BYTES, Bucket, TransferPlan

# Threads of a rank that encode; together they encode about as much in a second as a fast network carries.
ENCODING_THREADS = 4

MOST_WAITING_BYTES = 4 * BUCKET_BYTES
"""Changes that wait for a slow server take up to so much memory; then the encoding waits."""

_HEAD = struct.Struct("!QQ")
_WHOLE, _CHANGES = 0, 1
# Changes that do not compress take a little more than the bucket; of a bucket of few bytes, much more.
_MOST_OVERHEAD = 4096


class SentCopy:
    """A copy, in host memory, of the buckets that a rank has sent last.

    Attributes:
        size_bytes: size of the copy: the rank's part of the weights, 0 before the first transfer.
    """

    def __init__(self) -> None:
        self._plan = TransferPlan()
        self._buckets: list[Bytes] = []
        self._item_bytes: list[int] = []
        # Names of the snapshots that have these bytes; none while the copy is incomplete.
        self._snapshots: frozenset[str] = frozenset()
        self._threads: ThreadPoolExecutor | None = None
        self._before = self._snapshots
        self._has_base = self._differs = False

    @property
    def size_bytes(self) -> int:
        """Size of the copy in bytes."""
        return sum(map(len, self._buckets))

    def has(self, plan: TransferPlan, snapshot: str) -> bool:
        """Return True if the copy is this rank's part of a snapshot, sent by this plan."""
        return snapshot in self._snapshots and plan == self._plan

    def begin(self, plan: TransferPlan, buckets: Sequence[Bucket]) -> None:
        """Prepare for the buckets of the next snapshot, which `encode` then gets in any order."""
        self._has_base, self._differs = bool(self._snapshots) and plan == self._plan, False
        self._before, self._snapshots = self._snapshots, frozenset()
        if not self._has_base:
            self._plan, self._item_bytes = plan, _find_item_bytes(plan, buckets)
            self._buckets = [np.empty(each.size_bytes, np.uint8) for each in buckets]
        if self._threads is None:
            n_threads = min(ENCODING_THREADS, os.cpu_count() or 1)
            with use_all_cores():
                self._threads = ThreadPoolExecutor(n_threads, "changes")

    def encode(self, number: int, parts: Sequence[torch.Tensor]) -> bytes:
        """Copy a bucket's new bytes, given as [n] uint8 each in host memory; returns its changes, b"" without an earlier snapshot."""
        new, kept = ByteRun([each.numpy() for each in parts]), self._buckets[number]
        if not self._has_base or self._threads is None:
            kept[:] = new.read(0, new.size_bytes)
            return b""
        changes, differs = encode_changes(kept, new, self._item_bytes[number], self._threads.map)
        self._differs |= differs
        return changes

    def finish(self, snapshot: str) -> None:
        """Name the snapshot whose buckets have all been encoded."""
        # The same weights sent again, to one server for example, are the snapshot that the other servers hold as well.
        same = self._before if self._has_base and not self._differs else frozenset()
        self._snapshots = same | {snapshot}

    def forget(self) -> None:
        """Free the copy: the next transfers are of whole weights."""
        self._snapshots, self._buckets = frozenset(), []
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


class ChangesPublisher:
    """Encodes the buckets of one transfer once they are written, and publishes their changes for all links that send them.

    Args:
        copy: what was sent last; `SentCopy.begin` has been called.
        ready: one future for each bucket, which gets its changes; empty if no server gets changes.
        await_taken: waits until all servers that get changes have taken one of the given buckets.
    """

    def __init__(self, copy: SentCopy, ready: list[ReadyBucket], await_taken: AwaitTaken) -> None:
        self._copy, self._ready, self._await_taken = copy, ready, await_taken
        # Bytes of the changes that may not have been taken, by bucket.
        self._waiting: dict[int, int] = {}

    def publish(self, number: int, parts: Sequence[torch.Tensor]) -> None:
        """Encode a bucket, given as [n] uint8 each in host memory; may wait until earlier changes have been taken."""
        changes = self._copy.encode(number, parts)
        if not self._ready:
            return
        self._waiting[number] = len(changes)
        while len(self._waiting) > 1 and sum(self._waiting.values()) > MOST_WAITING_BYTES:
            taken = self._await_taken(tuple(self._waiting)[:-1])
            del self._waiting[taken]
            # Frees the changes.
            self._ready[taken] = Future()
        self._ready[number].set_result([torch.frombuffer(bytearray(changes), dtype=torch.uint8)])


def _find_item_bytes(plan: TransferPlan, buckets: Sequence[Bucket]) -> list[int]:
    """Return, for each bucket, the size of the smallest elements that it has bytes of."""
    starts = np.array([each.offset for each in plan.tensors], np.int64)
    sizes = np.array([ITEM_BYTES[each.dtype] for each in plan.tensors], np.int64)
    firsts = ([start for start, _ in bucket.ranges] for bucket in buckets)
    # A range is of one tensor.
    return [int(sizes[np.searchsorted(starts, each, "right") - 1].min()) for each in firsts]


def encode_head(n_bytes: int, *, is_changes: bool) -> torch.Tensor:
    """Encode the head of a bucket, [16] uint8: whether changes follow or the whole bucket, and how many bytes."""
    packed = bytearray(_HEAD.pack(_CHANGES if is_changes else _WHOLE, n_bytes))
    return torch.frombuffer(packed, dtype=torch.uint8)


def receive_bucket(link: ReceivingLink, parts: Sequence[torch.Tensor]) -> int:
    """Receive a bucket with its head into `parts`, which hold the earlier snapshot; returns the number of its bytes that travelled.

    Args:
        link: from the sender.
        parts: [n] uint8 each, in host memory.

    Raises:
        SyncError: the bucket did not arrive, or its changes are of other bytes than those in `parts`, which are then undefined.
    """
    size = sum(map(len, parts))
    head = torch.empty(_HEAD.size, dtype=torch.uint8)
    link.receive([head])
    kind, n_bytes = _HEAD.unpack(head.numpy().data)
    if kind == _WHOLE and n_bytes == size:
        link.receive(parts)
        return size
    if kind != _CHANGES or n_bytes > size + max(size, _MOST_OVERHEAD):
        raise SyncError(
            f"expected a bucket of {size} bytes or its changes, got {n_bytes} bytes of kind {kind}"
        )
    changes = torch.empty(n_bytes, dtype=torch.uint8)
    link.receive([changes])
    apply_changes(ByteRun([each.numpy() for each in parts]), changes.numpy().data)
    return int(n_bytes)
