"""One thing done by every rank, whose results come together on rank 0."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from tasks.errors import RollmillError, SyncError

T = TypeVar("T")


def of_every_rank(work: Callable[[], T], rank: int, world_size: int) -> list[T]:
    """[W] what `work` gives on each rank, on rank 0; nothing on the others. A collective, whatever fails on one rank.

    Raises:
        SyncError: the work failed on a rank with an error that we raise on purpose; on rank 0 alone.
    """
    own: T | RollmillError
    try:
        own = work()
    except RollmillError as error:
        own = error
    every: list[Any] | None = [own] if rank == 0 else None
    if world_size > 1:
        every = [None] * world_size if rank == 0 else None
        dist.gather_object(own, every)
    for number, each in enumerate(every or ()):
        if isinstance(each, RollmillError):
            raise SyncError(f"rank {number}: {each}")
    return every or []
