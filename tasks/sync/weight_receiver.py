"""The receiving end of a weight transfer; it does not depend on vLLM."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.observe.spans import add_short_span, current_lane
from rollmill.tasks.sync.changed_buckets import receive_bucket
from rollmill.tasks.sync.links.ipc_link import IpcReceiver
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
from rollmill.tasks.sync.stream_memory import ArrivingTensors, StreamMemory, WholeStream, view_tensor
from rollmill.tasks.sync.transfer_plan import Bucket, TransferPlan
from rollmill.tasks.sync.weight_messages import WAITING_FOR_TRAINER, WeightUpdateRequest

RECEIVERS: Mapping[str, Callable[[Rendezvous], ReceivingLink]] = {
    "tcp": TcpReceiver,
    "nccl": NcclReceiver,
    "shm": SharedReceiver,
    "ipc": IpcReceiver,
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
                rendezvous = Rendezvous(store, name, address, *limits, device, request.prefix)
                links.append(RECEIVERS[request.transport](rendezvous))
                started = time.perf_counter_ns()
                links[-1].open()
                add_short_span(WAITING_FOR_TRAINER, started, f"trainer/{rank}")
    except SyncError:
        for link in links:
            link.close()
        raise
    return links


class Reception:
    """Receives all buckets of a plan, with a thread for each link. Closing a link from another thread ends it.

    Args:
        links: [W * streams] from `open_links`; closed if one of them fails.
        plan: the transfer plan of the senders.
        memory: to receive into.
        has_heads: True if each bucket has a head, and may be the changes of what is in the memory.

    Attributes:
        received_bytes: number of bytes that travelled.
    """

    def __init__(
        self,
        links: Sequence[ReceivingLink],
        plan: TransferPlan,
        memory: StreamMemory,
        *,
        has_heads: bool = False,
    ) -> None:
        self.received_bytes, self._has_heads = 0, has_heads
        self._links, self._streams, self._memory = links, plan.streams, memory
        self._buckets = [plan.buckets(rank) for rank in range(plan.n_ranks)]
        self._lock, self._last = threading.Lock(), 0
        self._error: SyncError | None = None
        self._threads = [
            threading.Thread(target=self._run, args=each, daemon=True) for each in enumerate(links)
        ]

    def start(self) -> None:
        """Start one thread for each link, which receives its buckets; returns at once, `join` waits for their end."""
        for link in self._links:
            link.stalls.take()
        with use_all_cores():
            for thread in self._threads:
                thread.start()

    def join(self) -> None:
        """Wait until no thread writes to the memory any more.

        Raises:
            SyncError: a sender stopped; names bucket, rank and bytes.
        """
        for thread in self._threads:
            thread.join()
        if self._error:
            raise self._error
        # The link that ended last held the reception up; the waits of the others overlap with its waits.
        if lane := current_lane():
            for link in self._links[self._last : self._last + 1]:
                for started, stopped in link.stalls.take():
                    lane.add(WAITING_FOR_TRAINER, started, stopped, f"trainer/{self._last // self._streams}")

    def cancel(self) -> None:
        """Close all links, and wait for the threads."""
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, link: ReceivingLink) -> None:
        rank, stream = divmod(number, self._streams)
        own = slice(stream, None, self._streams)
        receive = receive_bucket if self._has_heads else _receive_whole
        travelled, error = _receive_buckets(link, self._buckets[rank], rank, own, self._memory, receive)
        with self._lock:
            self._last = number
            self.received_bytes += travelled
            is_first = error is not None and self._error is None
            self._error = self._error or error
        if error and is_first:
            self._memory.fail(error)
            # The other threads would wait for their senders until the stall timeout.
            for each in self._links:
                each.close()


def stream_tensors(
    links: Sequence[ReceivingLink], plan: TransferPlan, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of each tensor of a plan, on `device`, in the order in which they are complete.

    Others arrive meanwhile, but at most some buckets wait to be taken. A tensor's memory is freed when the caller drops it.

    Args:
        links: as of `Reception`; closed if the caller stops before the last tensor.
        plan: the transfer plan of the senders.
        device: to receive on.

    Raises:
        SyncError: a sender stopped; names bucket, rank and bytes.
    """
    memory = ArrivingTensors(plan, device)
    reception = Reception(links, plan, memory)
    reception.start()
    is_complete = False
    try:
        for _ in plan.tensors:
            yield memory.take()
        is_complete = True
    finally:
        if not is_complete:
            memory.fail(SyncError("the weights are not taken any more"))
            reception.cancel()
    reception.join()


def view_tensors(plan: TransferPlan, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of each tensor of a plan, as views of a buffer that holds the whole stream."""
    return [
        (each.name, view_tensor(each, buffer[each.offset : each.offset + each.size_bytes]))
        for each in plan.tensors
    ]


def _receive_whole(link: ReceivingLink, parts: Sequence[torch.Tensor]) -> int:
    """Receive a bucket without a head into `parts`; returns the number of its bytes."""
    link.receive(parts)
    return sum(map(len, parts))


def _receive_buckets(
    link: ReceivingLink,
    buckets: Sequence[Bucket],
    rank: int,
    own: slice,
    memory: StreamMemory,
    receive: Callable[[ReceivingLink, Sequence[torch.Tensor]], int],
) -> tuple[int, SyncError | None]:
    """Receive the buckets `own` of a rank's; returns how many bytes travelled, and the error that ended the link, if any."""
    arrived = travelled = 0
    for number in range(len(buckets))[own]:
        ranges = buckets[number].ranges
        try:
            travelled += receive(link, memory.views(ranges))
        except (SyncError, OSError, RuntimeError, MemoryError) as error:
            total = sum(each.size_bytes for each in buckets[own])
            return travelled, SyncError(
                f"bucket {number + 1} of {len(buckets)} of rank {rank} did not arrive: {error}; "
                f"{arrived / 1e6:.1f} of its {total / 1e6:.1f} MB of this link had"
            )
        memory.mark_arrived(ranges)
        arrived += buckets[number].size_bytes
    return travelled, None


class WeightInbox:
    """Receives weights for one worker of a server, from the trainer's ranks or from files, into a buffer.

    Buffer and links are kept for the next request, which may bring only the changes of what is in the buffer. The links to the ranks are opened again when a request has another `prefix`
    (see `SendTarget`). The buffer is replaced when a request needs a larger one, or starts, changes or stops using the
    trainer's shared memory.
    """

    # A cancelled request leaves its inbox to the thread that may still write into it; the next request gets another.

    def __init__(self, worker: int, device: torch.device = CPU) -> None:
        self._worker, self._device = worker, device
        self._prefix, self._links = "", list[ReceivingLink]()
        # The trainer's shared segment: its path, and the prefix of the links, which changes with the segment. The path may not.
        self._shared = "", ""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._is_dropped = False
        # What the buffer, or the memory at a path, holds: snapshot, encoded plan and path; none while it is written.
        self._held = "", b"", ""

    def stream(self, request: WeightUpdateRequest) -> Iterator[tuple[str, torch.Tensor]]:
        """Open the links, and return an iterator that receives all tensors of a request, as `stream_tensors`.

        Raises:
            SyncError: the trainer or one of its ranks did not come in time.
        """
        plan = request.decode_plan()
        return stream_tensors(self._open_links_for(request, plan), plan, self._device)

    def receive(
        self, request: WeightUpdateRequest, memory: str = ""
    ) -> tuple[list[tuple[str, torch.Tensor]], int]:
        """Receive all tensors of a request; returns (name, tensor) of each, views of the buffer, and how many bytes travelled.

        The buffer is the shared memory at the path `memory`, or one of this process if that is empty.

        Raises:
            SyncError: the tensors did not arrive in time, a file cannot be read, or changes are of another snapshot than is held.
        """
        plan, held = request.decode_plan(), self._held
        if request.base_snapshot and held != (request.base_snapshot, request.plan, memory):
            raise SyncError(
                f"the changes are of the snapshot {request.base_snapshot}, this server holds {held[0] or 'none'}"
            )
        # A reception that fails leaves parts of two snapshots.
        self._held = "", b"", ""
        if memory:
            buffer = open_shared(memory, plan.total_bytes, is_writable=True)
        else:
            buffer = self._choose_buffer(request, plan.total_bytes)
        if request.transport == "files":
            limits = {"timeout_s": request.timeout_s, "stall_timeout_s": request.stall_timeout_s}
            n_bytes = read_weight_files(request.files, plan, buffer, held=request.base_snapshot, **limits)
        else:
            links, has_heads = self._open_links_for(request, plan), bool(request.base_snapshot)
            reception = Reception(links, plan, WholeStream(buffer), has_heads=has_heads)
            reception.start()
            reception.join()
            n_bytes = reception.received_bytes
        if request.snapshot:
            self._held = request.snapshot, request.plan, memory
        return view_tensors(plan, buffer), n_bytes

    def drop(self) -> None:
        """Close the links for good, which ends a reception in progress."""
        self._is_dropped = True
        for link in self._links:
            link.close()

    def _choose_buffer(self, request: WeightUpdateRequest, size_bytes: int) -> torch.Tensor:
        """Return uint8 memory of at least `size_bytes`, to receive into: host memory, the trainer's shared segment, or the device's.

        The shared segment stays mapped while the trainer offers it. Memory of a GPU is not kept.
        """
        # A second model, with which mode verify compares, needs the GPU's memory.
        if request.arrives_on_device and request.mode != "verify":
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        path = request.shared if request.transport == "shm" else ""
        shared = path, request.prefix if path else ""
        # A new buffer for each request would make the reception four times slower.
        if self._shared != shared or self._buffer.numel() < size_bytes:
            self._buffer = (
                open_shared(path, size_bytes, is_writable=False)
                if path
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
