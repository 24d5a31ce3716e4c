"""One trainer rank's end of a weight transfer: sends its buckets to every server at the same time."""

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tasks.errors import SyncError
from tasks.observe.short_spans import timed
from tasks.observe.spans import current_lane
from tasks.sync.buckets import Bucket, TransferPlan
from tasks.sync.delivery import Delivery
from tasks.sync.filling import Board, Filling, Keep, Piece, Staging, keep_in
from tasks.sync.link import Meeting, SendingLink, join_store, link_name, local_address
from tasks.sync.order import Sent, Target
from tasks.sync.transports import sending_link

__all__ = ["Piece", "WeightSender"]


class WeightSender:
    """Sends a rank's part of a model's weights to any number of servers, over links of its own to each.

    Args:
        rank: which of the plan's senders it is.
        host: address of the store at which links are opened.
        port: the store's.
        timeout_s: seconds that one transfer may take, the opening of links included.
        stall_timeout_s: seconds in which a server must take something.
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
        self._rank = rank
        self._timeout_s, self._stall_timeout_s, self._straggler_s = timeout_s, stall_timeout_s, straggler_s
        self._store = join_store(host, port, timeout_s)
        self._address = local_address(host, port, timeout_s)
        self._links: dict[str, tuple[str, list[SendingLink]]] = {}
        self._staging = {device: Staging(device) for device in ("cpu", "cuda")}
        self._under_way: Mapping[str, Delivery] = {}

    def send(
        self,
        plan: TransferPlan,
        targets: Sequence[Target],
        pieces: Iterable[Piece],
        shared: torch.Tensor | None = None,
    ) -> list[Sent]:
        """Send this rank's part of all weights; a server that fails does not hold the others.

        Weights may be changed once it returns: what was given up reads them no more.

        Args:
            plan: whose part of this rank is sent.
            targets: the servers.
            pieces: in the order of the stream, this rank's part or more.
            shared: [total_bytes] uint8 that targets of the transport shm read.

        Returns:
            What became of each target, in their order.

        Raises:
            SyncError: the pieces are not those of the plan.
        """
        started, buckets = time.monotonic(), plan.senders[self._rank]
        boards = {_home(each.transport): Board() for each in targets}
        fillings = [
            Filling(buckets, self._keep(home, buckets, shared), board) for home, board in boards.items()
        ]
        ended = queue.SimpleQueue[Delivery]()
        self._under_way = deliveries = self._deliveries(plan, targets, boards, ended.put)
        try:
            for each in deliveries.values():
                each.start()
            _fill(fillings, pieces)
            filled = time.perf_counter_ns()
            self._await(deliveries, ended, started)
            _book_stalls(deliveries, filled)
        except Exception as error:
            for board in boards.values():
                board.fail(error)
            for each in deliveries.values():
                each.give_up(f"the trainer could not give its weights: {error}")
            raise
        finally:
            for server, each in deliveries.items():
                each.join()
                if each.error:
                    self._links.pop(server)
        return [
            Sent(server, each.sent_bytes, each.ended_at - started, each.error)
            for server, each in deliveries.items()
        ]

    def _deliveries(
        self,
        plan: TransferPlan,
        targets: Sequence[Target],
        boards: Mapping[str, Board],
        tell: Callable[[Delivery], None],
    ) -> dict[str, Delivery]:
        """One for each target, by server, not yet begun; `tell` is told of those that have ended."""
        sizes = [bucket.size_bytes for bucket in plan.senders[self._rank]]
        return {
            each.server: Delivery(
                self._links_to(each, plan.streams), plan.streams, sizes, boards[_home(each.transport)], tell
            )
            for each in targets
        }

    def progress(self) -> dict[str, int]:
        """Bytes handed over to each server in the transfer that is under way, or was last; from any thread."""
        return {server: each.sent_bytes for server, each in self._under_way.items()}

    def close(self) -> None:
        """Drop all links."""
        for _, links in self._links.values():
            for link in links:
                link.close()
        self._links.clear()

    def _await(
        self, deliveries: Mapping[str, Delivery], ended: "queue.SimpleQueue[Delivery]", started: float
    ) -> None:
        """Wait for all; those that are too slow are given up."""
        deadline, reason = (
            started + self._timeout_s,
            f"it took longer than {self._timeout_s:g} s (sync.timeout_s)",
        )
        left = set(deliveries.values())
        while left:
            try:
                done = ended.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                for each in left:
                    each.give_up(reason)
                return
            left.remove(done)
            if not done.error and done.ended_at + self._straggler_s < deadline:
                deadline = done.ended_at + self._straggler_s
                reason = f"it was not done {self._straggler_s:g} s after another server (sync.straggler_s)"

    def _keep(self, home: str, buckets: Sequence[Bucket], shared: torch.Tensor | None) -> Keep:
        if home != "shared":
            return self._staging[home].keeper(buckets)
        if shared is None:
            raise SyncError("there is no shared memory to write weights to: set sync.transport=tcp")
        return keep_in(shared)

    def _links_to(self, target: Target, streams: int) -> dict[SendingLink, bool]:
        """[workers * streams] links, True for those that are open: under the same prefix."""
        prefix, links = self._links.get(target.server, ("", []))
        if prefix == target.prefix:
            return dict.fromkeys(links, True)
        for link in links:
            link.close()
        links = [
            sending_link(
                target.transport,
                Meeting(
                    self._store,
                    link_name(target.prefix, self._rank, worker, stream),
                    self._address,
                    self._timeout_s,
                    self._stall_timeout_s,
                ),
            )
            for worker in range(target.workers)
            for stream in range(streams)
        ]
        self._links[target.server] = target.prefix, links
        return dict.fromkeys(links, False)


def _home(transport: str) -> str:
    """Where a transport takes bytes from."""
    return {"shm": "shared", "nccl": "cuda"}.get(transport, "cpu")


def _fill(fillings: Sequence[Filling], pieces: Iterable[Piece]) -> None:
    for piece in timed(pieces, "gathering"):
        for filling in fillings:
            filling.add(piece)
    for filling in fillings:
        filling.finish()


def _book_stalls(deliveries: Mapping[str, Delivery], filled: int) -> None:
    """Book what the rank waited, after everything was ready, for the server that was done last."""
    lane = current_lane()
    if lane is None or not deliveries:
        return
    server, last = max(deliveries.items(), key=lambda each: each[1].ended_at)
    for started, ended in last.stalls:
        if ended > filled:
            lane.add("waiting_for_receiver", max(started, filled), ended, server)
