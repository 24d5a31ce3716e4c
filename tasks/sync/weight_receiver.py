"""The receiving end of a weight transfer; it does not depend on vLLM."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.observe.spans import add_short_span, current_lane
from rollmill.tasks.sync.links.link import (
    CPU,
    ReceivingLink,
    Rendezvous,
    join_store,
    link_name,
    local_address,
    use_all_cores,
)
from rollmill.tasks.sync.links.nccl_link import NcclReceiver
from rollmill.tasks.sync.links.shm_link import SharedReceiver, open_shared
from rollmill.tasks.sync.links.tcp_link import TcpReceiver
from rollmill.tasks.sync.links.weight_files import read_weight_files
from rollmill.tasks.sync.transfer_plan import Bucket, TransferPlan
from rollmill.tasks.sync.weight_messages import WAITING_FOR_TRAINER, WeightUpdateRequest

RECEIVERS: Mapping[str, Callable[[Rendezvous], ReceivingLink]] = {
    "tcp": TcpReceiver,
    "nccl": NcclReceiver,
    "shm": SharedReceiver,
}
"""The server's end of a link, by transport."""


def open_links(
    request: WeightUpdateRequest,
    plan: TransferPlan,
    worker: int,
    device: torch.device = CPU,
) -> list[ReceivingLink]:
    """Open [W * streams] links from all ranks of the trainer to one worker of a server, under the request's prefix.

    `device` is that of the worker's model.

    Raises:
        SyncError: there is no such transport; the trainer or one of its ranks did not come in time; no link is left open.
    """
    if request.transport not in RECEIVERS:
        raise SyncError(f"expected a link by {', '.join(RECEIVERS)}, got {request.transport!r}")
    try:
        address = local_address(request.host, request.port, request.timeout_s)
        store = join_store(request.host, request.port, request.timeout_s)
    except (OSError, RuntimeError) as error:
        raise SyncError(f"the trainer cannot be reached at {request.host}:{request.port}: {error}") from error
    links = []
    try:
        for rank in range(plan.n_ranks):
            for stream in range(plan.streams):
                name = link_name(request.prefix, rank, worker, stream)
                limits = request.timeout_s, request.stall_timeout_s
                rendezvous = Rendezvous(store, name, address, *limits, device)
                links.append(RECEIVERS[request.transport](rendezvous))
                started = time.perf_counter_ns()
                links[-1].open()
                add_short_span(WAITING_FOR_TRAINER, started, f"trainer/{rank}")
    except SyncError:
        for link in links:
            link.close()
        raise
    return links


def receive_tensors(
    links: Sequence[ReceivingLink], plan: TransferPlan, buffer: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """Receive all tensors of a plan from all ranks; returns (name, tensor) of each, views of the buffer.

    Each link has a thread. Closing a link from another thread ends the reception. After the return, or an error, no thread
    writes to the buffer any more.

    Args:
        links: [W * streams] from `open_links`; closed if one of them fails.
        plan: the transfer plan of the senders.
        buffer: uint8, at least `plan.total_bytes`.

    Raises:
        SyncError: a sender stopped; names bucket, rank and bytes.
    """
    ends = queue.SimpleQueue[tuple[int, SyncError | None]]()
    buckets = [plan.buckets(rank) for rank in range(plan.n_ranks)]

    def receive(number: int, link: ReceivingLink) -> None:
        rank, stream = divmod(number, plan.streams)
        ends.put(
            (number, _receive_buckets(link, buckets[rank], rank, slice(stream, None, plan.streams), buffer))
        )

    threads = [threading.Thread(target=receive, args=each, daemon=True) for each in enumerate(links)]
    for link in links:
        link.stalls.take()
    with use_all_cores():
        for thread in threads:
            thread.start()
    last, failure = 0, None
    for _ in threads:
        last, error = ends.get()
        if error and not failure:
            failure = error
            # The other threads would wait for their senders until the stall timeout.
            for link in links:
                link.close()
    for thread in threads:
        thread.join()
    if failure:
        raise failure
    # The link that ended last held the reception up; the waits of the others overlap with its waits.
    _record_stalls(links[last : last + 1], f"trainer/{last // plan.streams}")
    return view_tensors(plan, buffer)


def _record_stalls(links: Sequence[ReceivingLink], cause: str) -> None:
    if lane := current_lane():
        for started, stopped in (stall for link in links for stall in link.stalls.take()):
            lane.add(WAITING_FOR_TRAINER, started, stopped, cause)


def view_tensors(plan: TransferPlan, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of each tensor of a plan, as views of a buffer that holds the whole stream."""
    return [
        (
            each.name,
            buffer[each.offset : each.offset + each.size_bytes]
            .view(getattr(torch, each.dtype))
            .view(each.shape),
        )
        for each in plan.tensors
    ]


def _receive_buckets(
    link: ReceivingLink, buckets: Sequence[Bucket], rank: int, own: slice, buffer: torch.Tensor
) -> SyncError | None:
    """Receive the buckets `own` of a rank's; returns the error that ended the link, None once all have arrived."""
    arrived = 0
    for number in range(len(buckets))[own]:
        try:
            link.receive([buffer[start:end] for start, end in buckets[number].ranges])
        except (SyncError, OSError, RuntimeError) as error:
            total = sum(each.size_bytes for each in buckets[own])
            return SyncError(
                f"bucket {number + 1} of {len(buckets)} of rank {rank} did not arrive: {error}; "
                f"{arrived / 1e6:.1f} of its {total / 1e6:.1f} MB of this link had"
            )
        arrived += buckets[number].size_bytes
    return None


class WeightInbox:
    """Receives weights for one worker of a server, from the trainer's ranks or from files, into a buffer.

    Buffer and links are kept for the next request. The links to the ranks are opened again when a request has another `prefix`
    (see `SendTarget`). The buffer is replaced when a request needs a larger one, or starts, changes or stops using the
    trainer's shared memory.
    """

    # A cancelled request leaves its inbox to the thread that may still write into it; the next request gets another.

    def __init__(self, worker: int, device: torch.device = CPU) -> None:
        self._worker, self._device = worker, device
        self._prefix, self._links = "", list[ReceivingLink]()
        self._shared, self._buffer = "", torch.empty(0, dtype=torch.uint8)
        self._is_dropped = False

    def receive(self, request: WeightUpdateRequest) -> list[tuple[str, torch.Tensor]]:
        """Receive all tensors of a request; returns (name, tensor) of each, views of the buffer, once all have arrived.

        Raises:
            SyncError: the tensors did not arrive in time, or a file cannot be read.
        """
        plan = request.decode_plan()
        buffer = self._choose_buffer(request, plan.total_bytes)
        if request.transport == "files":
            limits = {"timeout_s": request.timeout_s, "stall_timeout_s": request.stall_timeout_s}
            read_weight_files(request.files, plan, buffer, **limits)
            return view_tensors(plan, buffer)
        return receive_tensors(self._open_links_for(request, plan), plan, buffer)

    def drop(self) -> None:
        """Close the links for good, which ends a reception in progress."""
        self._is_dropped = True
        for link in self._links:
            link.close()

    def _choose_buffer(self, request: WeightUpdateRequest, size_bytes: int) -> torch.Tensor:
        """Return uint8 memory of at least `size_bytes`, to receive into: the worker's, or the trainer's shared segment.

        The shared segment stays mapped while the trainer offers it.
        """
        shared = request.shared if request.transport == "shm" else ""
        # A new buffer for each request would make the reception four times slower.
        if self._shared != shared or self._buffer.numel() < size_bytes:
            self._buffer = (
                open_shared(shared, size_bytes, is_writable=False)
                if shared
                else torch.empty(size_bytes, dtype=torch.uint8)
            )
            self._shared = shared
        return self._buffer

    def _open_links_for(self, request: WeightUpdateRequest, plan: TransferPlan) -> list[ReceivingLink]:
        """Return the [W * streams] links under a request's prefix, and open them unless they are open already."""
        if request.prefix != self._prefix:
            for link in self._links:
                link.close()
            self._links = open_links(request, plan, self._worker, self._device)
            self._prefix = request.prefix
        # `drop` may have been called while the links were opened, and has not closed them then.
        if self._is_dropped:
            self.drop()
        return self._links
