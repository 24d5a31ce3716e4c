"""A server's worker that takes weights and loads them nowhere: the product's reception, and the ways of others.

`python -m benchmarks.weights.receiver ADDRESS PORT DELAY_S`
"""

import sys
import time
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from benchmarks.weights.control import serve
from benchmarks.weights.gloo_pair import RECEIVER, SENDER, open_pair
from rollmill.tasks.processes.machine import machine_id
from rollmill.tasks.sync.links.link import join_store, local_address
from rollmill.tasks.sync.weight_messages import ServerLocation, WeightUpdateRequest, WeightUpdateResponse
from rollmill.tasks.sync.weight_receiver import WeightInbox
from rollmill.tasks.train.checkpoints.tensor_digests import hash_tensor

TIMEOUT_S = 120.0


class Receiver:
    """What the control API calls."""

    def __init__(self) -> None:
        self._inbox, self._pairs = WeightInbox(0), list[Any]()
        self._large = torch.empty(0, dtype=torch.uint8)

    def cpu_s(self, _: Any) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def place(self, _: Any) -> dict[str, Any]:
        """Where this process runs."""
        return asdict(ServerLocation(machine_id(), "cpu"))

    def take(self, given: str) -> dict[str, Any]:
        """A request of the product's."""
        order, started = msgspec.json.decode(given, type=WeightUpdateRequest), time.perf_counter()
        tensors, n_bytes = self._inbox.receive(order)
        seconds, found = time.perf_counter() - started, dict(tensors)
        digests = {name: hash_tensor(found[name]) for name in order.checksums}
        return asdict(WeightUpdateResponse(n_bytes, seconds, 0.0, digests))

    def join(self, given: dict[str, Any]) -> None:
        """Open pairs with the ranks, as others' process group."""
        store = join_store(given["host"], given["port"], TIMEOUT_S)
        address = local_address(given["host"], given["port"], TIMEOUT_S)
        self._pairs = [
            open_pair(store, f"pair/{number}", RECEIVER, address, TIMEOUT_S)
            for number in range(given["pairs"])
        ]

    def parameter(self, given: dict[str, Any]) -> None:
        """One parameter, whole from rank 0."""
        tensor = torch.empty(given["numbers"], dtype=torch.bfloat16)
        self._pairs[0].recv([tensor], SENDER, given["number"]).wait()

    def large(self, given: dict[str, Any]) -> None:
        """One large tensor, a part from each rank."""
        if self._large.numel() != given["bytes"]:
            self._large = torch.empty(given["bytes"], dtype=torch.uint8)
        parts = self._large.chunk(len(self._pairs))
        for work in [pair.recv([part], SENDER, 0) for pair, part in zip(self._pairs, parts, strict=True)]:
            work.wait()


def main() -> None:
    torch.set_num_threads(1)
    address, port, delay_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    receiver = Receiver()
    names = ("cpu_s", "place", "take", "join", "parameter", "large")
    serve(address, port, {name: getattr(receiver, name) for name in names}, delay_s)


if __name__ == "__main__":
    main()
