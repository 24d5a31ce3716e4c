"""Where a server's worker takes weights, by any transport."""

from typing import Any

import torch

from tasks.sync.buckets import TransferPlan
from tasks.sync.link import RECEIVER, join_store, link_name, open_link
from tasks.sync.order import WeightOrder
from tasks.sync.receiver import arriving, views
from tasks.sync.stored import read_stored


class Inbox:
    """What outlasts an order: the buffer, allocated once, and the links, open under one prefix.

    An order that is given up leaves its inbox to the thread that may still write into it, and the next gets another.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._prefix, self._links = "", list[Any]()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, order: WeightOrder) -> list[tuple[str, torch.Tensor]]:
        """All tensors of an order, views of the buffer, once they are there."""
        plan = TransferPlan.from_json(**order.plan)
        if self._buffer.numel() < plan.total_bytes:
            self._buffer = torch.empty(plan.total_bytes, dtype=torch.uint8)
        if order.transport == "files":
            limits = {"timeout_s": order.timeout_s, "stall_timeout_s": order.stall_timeout_s}
            read_stored(order.files, plan, self._buffer, **limits)
            return list(views(plan, self._buffer))
        return list(arriving(self._links_of(order, len(plan.senders)), plan, self._buffer))

    def _links_of(self, order: WeightOrder, n_senders: int) -> list[Any]:
        """[W] links, opened unless they are open under the same prefix."""
        if order.prefix != self._prefix:
            store = join_store(order.host, order.port, order.timeout_s)
            self._links = [
                open_link(
                    store, link_name(order.prefix, rank, self._worker), RECEIVER, order.host, order.timeout_s
                )
                for rank in range(n_senders)
            ]
            self._prefix = order.prefix
        return self._links
