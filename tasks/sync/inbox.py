"""Where a server's worker takes weights, by any transport."""

import torch

from tasks.sync.buckets import TransferPlan
from tasks.sync.link import ReceivingLink
from tasks.sync.order import WeightOrder
from tasks.sync.receiver import arriving, open_links, views
from tasks.sync.shared_memory import open_shared
from tasks.sync.stored import read_stored


class Inbox:
    """What outlasts an order: the buffer, allocated once, and the links, open under one prefix.

    An order that is given up leaves its inbox to the thread that may still write into it, and the next gets another.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._prefix, self._links = "", list[ReceivingLink]()
        self._shared, self._buffer = "", torch.empty(0, dtype=torch.uint8)
        self._is_dropped = False

    def take(self, order: WeightOrder) -> list[tuple[str, torch.Tensor]]:
        """All tensors of an order, views of the buffer, once they are there."""
        plan = TransferPlan.from_json(**order.plan)
        buffer = self._buffer_of(order, plan.total_bytes)
        if order.transport == "files":
            limits = {"timeout_s": order.timeout_s, "stall_timeout_s": order.stall_timeout_s}
            read_stored(order.files, plan, buffer, **limits)
            return list(views(plan, buffer))
        return list(arriving(self._links_of(order), plan, buffer))

    def drop(self) -> None:
        """Close the links, which ends a reception that is under way; of no use afterwards."""
        self._is_dropped = True
        for link in self._links:
            link.close()

    def _buffer_of(self, order: WeightOrder, size_bytes: int) -> torch.Tensor:
        """Own memory, or the trainer's, which stays mapped as long as it is the same."""
        shared = order.shared if order.transport == "shm" else ""
        if self._shared != shared or self._buffer.numel() < size_bytes:
            self._buffer = (
                open_shared(shared, size_bytes, is_writable=False)
                if shared
                else torch.empty(size_bytes, dtype=torch.uint8)
            )
            self._shared = shared
        return self._buffer

    def _links_of(self, order: WeightOrder) -> list[ReceivingLink]:
        """[W] links, opened unless they are open under the same prefix."""
        if order.prefix != self._prefix:
            for link in self._links:
                link.close()
            self._links = open_links(order, self._worker)
            self._prefix = order.prefix
        if self._is_dropped:
            self.drop()
        return self._links
