"""How the ranks that torchrun started find each other."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: W.
        device: where this rank computes.
        store: shared by all ranks, for what is no collective.
    """

    rank: int
    world_size: int
    device: torch.device
    store: Store

    def own_connection(self) -> Store:
        """A further connection to the store, for a thread that waits."""
        clone: Store = self.store.clone()  # type: ignore[attr-defined]  # torch has it, its stubs do not
        return clone


def join_ranks(timeout_s: float) -> Ranks:
    """Open the global process group; DeepSpeed takes it over.

    Args:
        timeout_s: seconds that one collective may wait for the slowest rank.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend,
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return Ranks(rank, world_size, device, PrefixStore("rollmill", store))


def is_first_here() -> bool:
    """True on one rank of each machine."""
    return int(os.environ["LOCAL_RANK"]) == 0
