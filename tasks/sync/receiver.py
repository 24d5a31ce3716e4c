"""The receiving end of a weight transfer, without anything of vLLM's."""

import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from tasks.errors import SyncError
from tasks.observe.short_spans import book
from tasks.observe.spans import current_lane
from tasks.sync.buckets import Bucket, Range, TensorPlan, TransferPlan
from tasks.sync.link import Meeting, ReceivingLink, all_cores, join_store, link_name, local_address
from tasks.sync.order import WAITING_FOR_TRAINER, WeightOrder
from tasks.sync.transports import receiving_link

_Arrivals = queue.SimpleQueue[Bucket | SyncError]


def open_links(order: WeightOrder, worker: int) -> list[ReceivingLink]:
    """[W * streams] links from all ranks of the trainer to one worker of a server, under the order's prefix.

    Raises:
        SyncError: the trainer, or one of its ranks, is not there in time; no link is left open.
    """
    try:
        address = local_address(order.host, order.port, order.timeout_s)
        store = join_store(order.host, order.port, order.timeout_s)
    except (OSError, RuntimeError) as error:
        raise SyncError(f"the trainer cannot be reached at {order.host}:{order.port}: {error}") from error
    links = []
    try:
        for rank in range(len(order.plan["senders"])):
            for stream in range(order.plan["streams"]):
                name = link_name(order.prefix, rank, worker, stream)
                meeting = Meeting(store, name, address, order.timeout_s, order.stall_timeout_s)
                links.append(receiving_link(order.transport, meeting))
                started = time.perf_counter_ns()
                links[-1].open()
                book(WAITING_FOR_TRAINER, started, f"trainer/{rank}")
    except SyncError:
        for link in links:
            link.close()
        raise
    return links


def arriving(
    links: Sequence[ReceivingLink], plan: TransferPlan, buffer: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of a plan, as soon as all its bytes have arrived, whichever rank they come from.

    A thread for each link receives; closing a link from elsewhere ends it all. When the last tensor was given, or
    nothing more comes, no thread writes to the buffer any more.

    Args:
        links: [W * streams] open, from `open_links`; they are closed when one of them fails or nobody waits any more.
        plan: the senders'.
        buffer: uint8, at least `plan.total_bytes`; the tensors are views of it.

    Raises:
        SyncError: a sender stopped sending.
    """
    arrivals: _Arrivals = queue.SimpleQueue()
    ended: list[int] = []

    def receive(number: int, link: ReceivingLink) -> None:
        _receive(link, plan, number, buffer, arrivals)
        ended.append(number)

    threads = [threading.Thread(target=receive, args=each, daemon=True) for each in enumerate(links)]
    for link in links:
        link.stalls.take()
    with all_cores():
        for thread in threads:
            thread.start()
    is_complete = False
    try:
        for tensor in _complete(plan, arrivals):
            yield _view(tensor, buffer)
        is_complete = True
    finally:
        for link in links if not is_complete else ():
            link.close()
        for thread in threads:
            thread.join()
    if ended:
        _book_stalls(links[ended[-1]], rank=ended[-1] // plan.streams)


def _book_stalls(link: ReceivingLink, rank: int) -> None:
    """Book what was waited for the rank whose last byte came last."""
    lane = current_lane()
    for started, stopped in link.stalls.take():
        if lane is not None:
            lane.add(WAITING_FOR_TRAINER, started, stopped, f"trainer/{rank}")


def views(plan: TransferPlan, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of a plan, as views of a buffer with the stream of all weights."""
    return (_view(tensor, buffer) for tensor in plan.tensors)


def _view(tensor: TensorPlan, buffer: torch.Tensor) -> tuple[str, torch.Tensor]:
    data = buffer[tensor.offset : tensor.offset + tensor.size_bytes]
    return tensor.name, data.view(getattr(torch, tensor.dtype)).view(tensor.shape)


def _receive(
    link: ReceivingLink, plan: TransferPlan, link_number: int, buffer: torch.Tensor, arrivals: _Arrivals
) -> None:
    """All buckets that come by one link."""
    rank, stream = divmod(link_number, plan.streams)
    buckets, arrived = plan.senders[rank], 0
    for number in range(stream, len(buckets), plan.streams):
        bucket = buckets[number]
        try:
            link.receive([buffer[start:end] for start, end in bucket.ranges])
        except (SyncError, OSError, RuntimeError) as error:
            total = sum(each.size_bytes for each in buckets[stream :: plan.streams])
            arrivals.put(
                SyncError(
                    f"bucket {number + 1} of {len(buckets)} of rank {rank} did not arrive: {error}; "
                    f"{arrived / 1e6:.1f} of its {total / 1e6:.1f} MB of this link had"
                )
            )
            return
        arrived += bucket.size_bytes
        arrivals.put(bucket)


def _complete(plan: TransferPlan, arrivals: _Arrivals) -> Iterator[TensorPlan]:
    """Tensors in the order in which they are complete; those without a byte come first."""
    filled = [each for each in plan.tensors if each.size_bytes]
    offsets, missing = [each.offset for each in filled], [each.size_bytes for each in filled]
    yield from (each for each in plan.tensors if not each.size_bytes)
    for _ in range(sum(map(len, plan.senders))):
        arrived = arrivals.get()
        if isinstance(arrived, SyncError):
            raise arrived
        for taken in arrived.ranges:
            for number in _touched(taken, offsets):
                missing[number] -= _overlap(taken, filled[number])
                if not missing[number]:
                    yield filled[number]


def _touched(taken: Range, offsets: Sequence[int]) -> range:
    """Tensors that begin before a range ends, from the one that it begins in."""
    return range(max(bisect_right(offsets, taken[0]) - 1, 0), bisect_right(offsets, taken[1] - 1))


def _overlap(taken: Range, tensor: TensorPlan) -> int:
    """Bytes of a tensor in a range."""
    return max(min(taken[1], tensor.offset + tensor.size_bytes) - max(taken[0], tensor.offset), 0)
