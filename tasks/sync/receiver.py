"""The receiving end of a weight transfer, without anything of vLLM's."""

from collections.abc import Iterator
from typing import Any

import torch

from tasks.errors import SyncError
from tasks.sync.buckets import TransferPlan
from tasks.sync.link import SENDER


def arriving(link: Any, plan: TransferPlan, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of a plan, given when its last byte is there; later ones are on their way.

    Args:
        link: from `open_link`, as the receiver.
        plan: the sender's.
        buffer: uint8, at least `plan.total_bytes`; the tensors are views of it.

    Raises:
        SyncError: the sender stopped sending, or was too slow for the link's timeout.
    """
    works = [(end, link.recv([buffer[start:end]], SENDER, 0)) for start, end in plan.buckets()]
    arrived, n_waited = 0, 0
    for tensor in plan.tensors:
        end = tensor.offset + tensor.size_bytes
        while arrived < end:
            arrived, work = works[n_waited]
            try:
                work.wait()
            except RuntimeError as error:
                raise SyncError(f"bucket {n_waited} of {len(works)} did not arrive: {error}") from error
            n_waited += 1
        yield tensor.name, buffer[tensor.offset : end].view(getattr(torch, tensor.dtype)).view(tensor.shape)
