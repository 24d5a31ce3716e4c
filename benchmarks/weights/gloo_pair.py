"""Two processes joined by torch's gloo: the yardstick for our own links."""

from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from rollmill.tasks.sync.links.link import use_all_cores

SENDER, RECEIVER = 0, 1


def open_pair(store: Store, name: str, rank: int, address: str, timeout_s: float) -> ProcessGroupGloo:
    """Join the other process under a name; RuntimeError if it does not come within `timeout_s` seconds."""
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    with use_all_cores():
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        return ProcessGroupGloo(PrefixStore(name, store.clone()), rank, 2, options)


def send(pair: ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Send a tensor to the receiver; returns when it is sent."""
    pair.send([tensor], RECEIVER, 0).wait()


def receive(pair: ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Receive a tensor from the sender; returns when it is there."""
    pair.recv([tensor], SENDER, 0).wait()
