"""One trainer rank's end of a weight transfer: fills buckets and sends them to every server."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tasks.errors import SyncError
from tasks.sync.buckets import TransferPlan
from tasks.sync.link import RECEIVER, SENDER, as_bytes, join_store, link_name, open_link
from tasks.sync.order import Sent, Target


class Piece(NamedTuple):
    """A part of the stream of all weights, where a rank has it.

    Attributes:
        offset: its first byte in the stream.
        data: contiguous, of any type and device.
        is_live: True when it lies still in memory until the transfer is over; else it is gone at the next piece.
    """

    offset: int
    data: torch.Tensor
    is_live: bool


class WeightSender:
    """Sends a rank's part of a model's weights to any number of servers, over links of its own to each.

    Args:
        rank: which of the plan's senders it is.
        host: address of the store at which links are opened.
        port: the store's.
        timeout_s: seconds that opening a link may take.
        stall_timeout_s: seconds that one bucket may take.
        straggler_s: seconds that slower servers are sent to after the first has everything.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        *,
        timeout_s: float,
        stall_timeout_s: float,
        straggler_s: float,
    ) -> None:
        self._rank, self._host = rank, host
        self._timeout_s, self._stall_timeout_s, self._straggler_s = timeout_s, stall_timeout_s, straggler_s
        self._store = join_store(host, port, timeout_s)
        self._links: dict[str, tuple[str, list[Any]]] = {}

    def send(self, plan: TransferPlan, targets: Sequence[Target], pieces: Iterable[Piece]) -> list[Sent]:
        """Send this rank's part of all weights; a server that fails does not hold the others.

        Args:
            plan: whose part of this rank is sent.
            targets: the servers.
            pieces: this rank's part, in the order of the stream.

        Returns:
            What became of each target, in their order.

        Raises:
            SyncError: the pieces are not those of the plan.
        """
        started = time.perf_counter()
        stream = torch.zeros(plan.total_bytes, dtype=torch.uint8)
        for piece in pieces:
            data = as_bytes(piece.data.detach().to("cpu").contiguous())
            stream[piece.offset : piece.offset + data.numel()].copy_(data)
        sent = []
        for target in targets:
            error = self._send(plan, target, stream)
            seconds = time.perf_counter() - started
            n_bytes = sum(bucket.size_bytes for bucket in plan.senders[self._rank])
            sent.append(Sent(target.server, 0 if error else n_bytes, seconds, error))
        return sent

    def close(self) -> None:
        """Drop all links."""
        self._links.clear()

    def _send(self, plan: TransferPlan, target: Target, stream: torch.Tensor) -> str:
        try:
            for link in self._links_to(target):
                for bucket in plan.senders[self._rank]:
                    data = torch.cat([stream[start:end] for start, end in bucket.ranges])
                    link.send([data], RECEIVER, 0).wait()
        except (RuntimeError, SyncError) as error:
            self._links.pop(target.server, None)
            return f"it stopped receiving: {error}"
        return ""

    def _links_to(self, target: Target) -> list[Any]:
        """[workers] links, opened unless they are open under the same prefix."""
        prefix, links = self._links.get(target.server, ("", []))
        if prefix != target.prefix:
            links = [
                open_link(
                    self._store,
                    link_name(target.prefix, self._rank, worker),
                    SENDER,
                    self._host,
                    self._timeout_s,
                )
                for worker in range(target.workers)
            ]
            self._links[target.server] = target.prefix, links
        return links
