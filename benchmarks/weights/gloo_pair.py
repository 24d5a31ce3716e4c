"""Two processes joined by torch's gloo: the yardstick for our own links."""

from datetime import timedelta

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
