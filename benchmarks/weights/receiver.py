"""A server's worker that takes weights and loads them nowhere: the product's reception, and the ways of others.

`python -m benchmarks.weights.receiver ADDRESS PORT DELAY_S`
"""

import sys
import time
from typing import Any

import torch

from benchmarks.weights.control import serve
from tasks.sync.gloo_link import RECEIVER, SENDER, open_pair
from tasks.sync.inbox import Inbox
from tasks.sync.link import join_store, local_address
from tasks.sync.order import ServerPlace, WeightAnswer, WeightOrder
from tasks.sync.place import this_machine

TIMEOUT_S = 120.0


class Receiver:
    """What the control API calls."""

    def __init__(self) -> None:
        self._inbox, self._pairs = Inbox(0), list[Any]()
        self._large = torch.empty(0, dtype=torch.uint8)

    def cpu_s(self, _: Any) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def place(self, _: Any) -> dict[str, Any]:
        """Where this process runs."""
        return ServerPlace(this_machine(), "cpu").to_json()

    def take(self, given: dict[str, Any]) -> dict[str, Any]:
        """An order of the product's."""
        order, started = WeightOrder.from_json(given), time.perf_counter()
        self._inbox.take(order)
        return WeightAnswer(order.plan["total_bytes"], time.perf_counter() - started, 0.0).to_json()

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
