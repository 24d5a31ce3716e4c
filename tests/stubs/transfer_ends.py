"""Both ends of a transfer over real links, in one process: the ranks of a trainer and workers of servers."""

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import ReceivingLink, serve_store
from rollmill.tasks.sync.stream_memory import WholeStream
from rollmill.tasks.sync.transfer_plan import TransferPlan, lay_out_tensors, share_evenly
from rollmill.tasks.sync.weight_messages import SendResult, SendTarget, WeightUpdateRequest, encode_plan
from rollmill.tasks.sync.weight_receiver import Reception, open_links, view_tensors
from rollmill.tasks.sync.weight_sender import WeightSender

HOST = "127.0.0.1"
TIMEOUT_S = 20.0
Weights = dict[str, torch.Tensor]


def weights_of(seed: int, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{n}.weight": torch.randn(shape, generator=generator).to(dtype)
        for n, (shape, dtype) in enumerate(shapes)
    }


def plan_of(weights: Weights, n_ranks: int = 1, bucket_bytes: int = 1000, streams: int = 1) -> TransferPlan:
    tensors = lay_out_tensors((name, each.shape, str(each.dtype)[6:]) for name, each in weights.items())
    return TransferPlan(tensors, share_evenly(tensors, n_ranks), n_ranks, bucket_bytes, streams)


def pieces_of(weights: Weights, *, is_live: bool = True) -> Iterator[Piece]:
    """All of them, from every rank; those that are not live are gone at the next one."""
    for tensor, data in zip(plan_of(weights).tensors, weights.values(), strict=True):
        given = data if is_live else data.clone()
        yield Piece(tensor.offset, given, is_live)
        if not is_live:
            given.zero_()


class Trainer:
    """W ranks' senders."""

    def __init__(self, n_ranks: int = 1, **limits: float) -> None:
        self.store = serve_store(HOST, TIMEOUT_S)
        given = {
            "timeout_s": TIMEOUT_S,
            "stall_timeout_s": TIMEOUT_S,
        } | limits
        straggler_timeout_s = given.pop("straggler_timeout_s", TIMEOUT_S)
        config = SyncConfig(**given)
        self.senders = [
            WeightSender(rank, HOST, self.store.port, config, straggler_timeout_s) for rank in range(n_ranks)
        ]

    def send(
        self,
        threads: ThreadPoolExecutor,
        weights: Weights,
        plan: TransferPlan,
        targets: Sequence[SendTarget],
        **more: Any,
    ) -> list[Future[list[SendResult]]]:
        """[W] futures of what each rank says."""
        is_live = more.pop("is_live", True)
        return [
            threads.submit(each.send, plan, targets, pieces_of(weights, is_live=is_live), **more)
            for each in self.senders
        ]

    def close(self) -> None:
        for each in self.senders:
            each.close()


def receive_tensors(
    links: Sequence[ReceivingLink], plan: TransferPlan, buffer: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor of a plan, views of the buffer, which no thread writes to after the return or an error."""
    reception = Reception(links, plan, WholeStream(buffer))
    reception.start()
    reception.join()
    return view_tensors(plan, buffer)


class Server:
    """One worker of a server."""

    def __init__(self, trainer: Trainer, transport: str = "tcp", stall_timeout_s: float = TIMEOUT_S) -> None:
        self.target = SendTarget(uuid.uuid4().hex, transport, uuid.uuid4().hex)
        self._port, self._stall_timeout_s = trainer.store.port, stall_timeout_s
        self.links: list[ReceivingLink] = []

    def open(self, plan: TransferPlan) -> None:
        self.links = open_links(self.order(plan), plan, 0)

    def order(self, plan: TransferPlan) -> WeightUpdateRequest:
        given = "run:1:1", "keep", self.target.transport, encode_plan(plan), TIMEOUT_S, self._stall_timeout_s
        return WeightUpdateRequest(*given, host=HOST, port=self._port, prefix=self.target.prefix)

    def receive(self, plan: TransferPlan, buffer: torch.Tensor | None = None) -> Weights:
        buffer = torch.empty(plan.total_bytes, dtype=torch.uint8) if buffer is None else buffer
        return dict(receive_tensors(self.links, plan, buffer))

    def open_and_receive(self, plan: TransferPlan, buffer: torch.Tensor | None = None) -> Weights:
        self.open(plan)
        return self.receive(plan, buffer)

    def close(self) -> None:
        for link in self.links:
            link.close()


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def transfer(
    trainer: Trainer, servers: list[Server], weights: Weights, plan: TransferPlan, **more: Any
) -> list[list[SendResult]]:
    """One transfer to servers that open their links when they have none; [W] what each rank says."""
    take = more.pop("take", Server.open_and_receive)
    with ThreadPoolExecutor(len(servers) + len(trainer.senders)) as threads:
        received = [threads.submit(take, each, plan) for each in servers]
        sent = trainer.send(threads, weights, plan, [each.target for each in servers], **more)
        for each in received:
            assert_equal(each.result(TIMEOUT_S), weights)
        return [each.result(TIMEOUT_S) for each in sent]


def sends(
    trainer: Trainer, weights: Weights, plan: TransferPlan, servers: Sequence[Server]
) -> list[SendResult]:
    return trainer.senders[0].send(plan, [each.target for each in servers], pieces_of(weights))


LARGE = [((1 << 22,), torch.float32)] * 3
"""48 MB: more than what a connection holds."""
