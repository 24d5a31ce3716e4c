"""The receiving end of a weight transfer, without anything of vLLM's."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tasks.errors import SyncError
from tasks.sync.buckets import TransferPlan
from tasks.sync.link import SENDER


def arriving(
    links: Sequence[Any], plan: TransferPlan, buffer: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of a plan, once all have arrived.

    Args:
        links: [W] from `open_link`, as the receiver, one for each sender.
        plan: the senders'.
        buffer: uint8, at least `plan.total_bytes`; the tensors are views of it.

    Raises:
        SyncError: a sender stopped sending, or was too slow for the link's timeout.
    """
    for rank, (link, buckets) in enumerate(zip(links, plan.senders, strict=True)):
        for number, bucket in enumerate(buckets):
            staging = torch.empty(bucket.size_bytes, dtype=torch.uint8)
            try:
                link.recv([staging], SENDER, 0).wait()
            except RuntimeError as error:
                raise SyncError(
                    f"bucket {number} of {len(buckets)} of rank {rank} did not arrive: {error}"
                ) from error
            at = 0
            for start, end in bucket.ranges:
                buffer[start:end].copy_(staging[at : at + end - start])
                at += end - start
    yield from views(plan, buffer)


def views(plan: TransferPlan, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of a plan, as views of a buffer with the stream of all weights."""
    for tensor in plan.tensors:
        data = buffer[tensor.offset : tensor.offset + tensor.size_bytes]
        yield tensor.name, data.view(getattr(torch, tensor.dtype)).view(tensor.shape)
