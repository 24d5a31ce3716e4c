"""A trainer's rank that has weights and trains nothing: the product's sender, and the ways of others.

`python -m benchmarks.weights.rank HOST PORT DELAY_S RANK RANKS MEETING_PORT`; rank 0 has the control API, the others follow.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.weights import model
from benchmarks.weights.control import Client, serve
from benchmarks.weights.gloo_pair import RECEIVER, SENDER, open_pair
from rollmill.tasks.processes.machine import machine_id
from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import as_bytes, join_store, serve_store
from rollmill.tasks.sync.links.shm_link import SharedMemory, open_shared
from rollmill.tasks.sync.transfer_plan import BUCKET_BYTES, STREAMS, TransferPlan
from rollmill.tasks.sync.weight_messages import ProcessLocation, SendTarget, WeightOffer
from rollmill.tasks.sync.weight_sender import WeightSender

TIMEOUT_S = 120.0
SYNC = SyncConfig()
N_CALLS_AT_ONCE = 16


class Rank:
    """What the control API calls on all ranks at once."""

    def __init__(self, host: str, rank: int, n_ranks: int) -> None:
        self._host, self._rank, self._n_ranks = host, rank, n_ranks
        self._weights = model.weights(rank, n_ranks)
        self._tensors = model.tensors()
        cuts = model.shard_cuts(self._tensors, n_ranks)
        self._plan = TransferPlan(self._tensors, cuts, n_ranks, BUCKET_BYTES, STREAMS)
        self._store = serve_store(host, TIMEOUT_S) if rank == 0 else None
        memory = SharedMemory(self._plan.total_bytes) if rank == 0 else None
        common: list[Any] = [self._store.port, memory.path] if self._store and memory else [None, None]
        dist.broadcast_object_list(common, 0)
        self._port, self._shared = common
        self._stream = (
            memory.stream if memory else open_shared(self._shared, self._plan.total_bytes, is_writable=True)
        )
        self._sender = WeightSender(rank, host, self._port, SYNC)
        self._pairs = list[Any]()
        self._large = torch.zeros(0, dtype=torch.uint8)

    def cpu_s(self, _: Any) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def offer(self, _: Any) -> dict[str, Any]:
        """See WeightOffer."""
        place = ProcessLocation(machine_id(), "cpu")
        return asdict(WeightOffer(self._plan, self._host, self._port, place, None, self._shared))

    def send(self, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The product's way."""
        targets = msgspec.convert(given, list[SendTarget])
        return [asdict(each) for each in self._sender.send(self._plan, targets, self._pieces(), self._stream)]

    def join(self, _: Any) -> None:
        """Open a pair with the receiver, as others' process group."""
        store = join_store(self._host, self._port, TIMEOUT_S)
        first = self._rank * STREAMS
        self._pairs = [
            open_pair(store, f"pair/{number}", SENDER, self._host, TIMEOUT_S)
            for number in range(first, first + STREAMS)
        ]

    def one_by_one(self, given: dict[str, Any]) -> None:
        """A call for each parameter, gathered first where ranks have shards, sent, and awaited."""
        server = Client(given["address"], given["port"])
        with ThreadPoolExecutor(1) as thread:
            for number, whole in enumerate(self._gathered()):
                if self._rank == 0:
                    call = {"number": number, "numbers": whole.numel()}
                    taken = thread.submit(server.call, "parameter", call)
                    self._pairs[0].send([whole], RECEIVER, number).wait()
                    taken.result()
                if self._n_ranks > 1:
                    dist.barrier()

    def dispatched(self, given: dict[str, Any]) -> None:
        """A call for each parameter, gathered first where ranks have shards; all are awaited at the end."""
        server = Client(given["address"], given["port"])
        with ThreadPoolExecutor(N_CALLS_AT_ONCE) as threads:
            taken, sent = [], []
            for number, whole in enumerate(self._gathered()):
                if self._rank == 0:
                    call = {"number": number, "numbers": whole.numel()}
                    taken.append(threads.submit(server.call, "parameter", call))
                    sent.append((whole, self._pairs[0].send([whole], RECEIVER, number)))
            for _, work in sent:
                work.wait()
            for each in taken:
                each.result()

    def large(self, given: dict[str, Any]) -> None:
        """This rank's part of one large tensor."""
        if not self._large.numel():
            self._large = (
                torch.ones(given["bytes"], dtype=torch.uint8).chunk(self._n_ranks)[self._rank].clone()
            )
        parts = self._large.chunk(len(self._pairs))
        with ThreadPoolExecutor(len(parts)) as threads:
            sent = list(threads.map(lambda pair, part: pair.send([part], RECEIVER, 0), self._pairs, parts))
        for work in sent:
            work.wait()

    def _pieces(self) -> Iterator[Piece]:
        for plan, own in zip(self._tensors, self._weights, strict=True):
            part = model.shard(plan.shape, self._rank, self._n_ranks)
            yield Piece(plan.offset + part.start * model.ITEM_BYTES, own, True)

    def _gathered(self) -> Iterator[torch.Tensor]:
        for (_, shape), own in zip(model.shapes(), self._weights, strict=True):
            if self._n_ranks == 1:
                yield own
                continue
            each = len(model.shard(shape, 0, self._n_ranks))
            padded = torch.nn.functional.pad(own, (0, each - len(own))) if len(own) < each else own
            whole = torch.empty(each * self._n_ranks, dtype=torch.bfloat16)
            dist.all_gather_into_tensor(as_bytes(whole), as_bytes(padded))
            yield whole[: torch.Size(shape).numel()]


def main() -> None:
    torch.set_num_threads(1)
    host, port, delay_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    number, n_ranks, meeting_port = map(int, sys.argv[4:])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{meeting_port}",
        rank=number,
        world_size=n_ranks,
        timeout=timedelta(hours=1),
    )
    rank = Rank(host, number, n_ranks)
    if number:
        while True:
            order: list[Any] = [None]
            dist.broadcast_object_list(order, 0)
            name, given = order[0]
            getattr(rank, name)(given)

    def on_all(name: str) -> Any:
        def route(given: Any) -> Any:
            dist.broadcast_object_list([(name, given)], 0)
            return getattr(rank, name)(given)

        return route

    alone = {name: getattr(rank, name) for name in ("cpu_s", "offer")}
    serve(
        host,
        port,
        alone | {name: on_all(name) for name in ("send", "join", "one_by_one", "dispatched", "large")},
        delay_s,
    )


if __name__ == "__main__":
    main()
