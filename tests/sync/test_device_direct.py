"""Weights by NCCL go from the links straight into a real vLLM server's model; gloo replaces NCCL, and host memory the memory of GPUs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollmill.tasks.errors import RequestsHeldError, SyncError
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import Broadcast, create_prefix, find_route
from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.transfer_plan import STREAMS
from rollmill.tasks.sync.weight_messages import SendResult, SendTarget, WeightOffer, WeightUpdateResponse
from rollmill.tasks.train.checkpoints.tensor_digests import hash_tensor
from rollmill.tasks.train.config import LoraConfig
from tests.stubs.parity import FLOAT32_NATS, largest_difference
from tests.stubs.transfer_ends import Trainer
from tests.sync import gloo_as_nccl

pytestmark = pytest.mark.service

SYNC = SyncConfig(timeout_s=60.0, stall_timeout_s=5.0)


@pytest.fixture(autouse=True)
def nccl_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_as_nccl.GlooAsNccl, "connected", threading.Semaphore(0))
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", gloo_as_nccl.GlooAsNccl, raising=False)


@pytest.fixture
async def client(vllm_server, use_repairs) -> AsyncIterator[VllmClient]:
    async with VllmClient(vllm_server.url, vllm_server.config) as client:
        await use_repairs(client)
        await client._call("POST", "/collective_rpc", {"method": "use_gloo_for_nccl"})
        yield client


async def send_by_nccl(source: Any, client: VllmClient, version: str, **more: Any) -> WeightUpdateResponse:
    """Send over new links; returns the server's response."""
    mode, offer = more.pop("mode", "keep"), await source.offer()
    # Both ends are on a CPU, so the transport is not chosen by where they are.
    route, _ = await find_route(client, offer, SYNC)
    target = replace(route, transport="nccl", prefix=create_prefix())
    broadcast = Broadcast(source, offer, {client: target}, version, SYNC, mode=mode, **more)
    _, response = await asyncio.gather(broadcast.send(), broadcast.update_server(client))
    return response


@pytest.mark.parametrize("mode", ["keep", "second_copy"])
async def test_a_server_computes_with_the_weights_that_it_was_sent(
    client, vllm_server, source_of, sequences, mode
):
    source = source_of(vllm_server.model)
    names = [each.name for each in (await source.offer()).plan.tensors]
    for number in (1, 2):
        source.change(seed=60 + number)
        version = f"run:{mode}:{number}"
        response = await send_by_nccl(source, client, version, mode=mode, checksums=names)
        weights = source.model.state_dict()
        assert response.checksums == {name: hash_tensor(weights[name]) for name in names}
        assert (response.bytes, response.differing) == (sum(weights[name].nbytes for name in names), ())
        assert await largest_difference(source, client, sequences, version) <= FLOAT32_NATS
        assert await client.version() == version


async def test_adapters_are_received_in_the_background(client, vllm_server, adapter_source_of, sequences):
    source = adapter_source_of(vllm_server.model, LoraConfig(rank=4, alpha=8.0))
    source.change(seed=70)
    response = await send_by_nccl(source, client, "run:1:1")
    assert response.differing == ()
    assert await largest_difference(source, client, sequences, "run:1:1") <= 1e-4


class BrokenSource:
    """A trainer that sends half of a model's tensors and then fails; a WeightSource."""

    def __init__(self, source: Any) -> None:
        self._source, self._trainer = source, Trainer()

    async def offer(self) -> WeightOffer:
        return replace(await self._source.offer(), port=self._trainer.store.port)

    async def send(self, targets: list[SendTarget], report: Any, every_s: float) -> list[SendResult]:
        plan, weights = (await self.offer()).plan, self._source.model.state_dict()

        def pieces() -> Iterator[Piece]:
            for each in plan.tensors[: len(plan.tensors) // 2]:
                yield Piece(each.offset, weights[each.name], False)
            # Before that, the server would still have its old weights.
            for _ in range(STREAMS):
                gloo_as_nccl.GlooAsNccl.connected.acquire(timeout=SYNC.timeout_s)
            raise SyncError("out of memory")

        (sender,) = self._trainer.senders
        return await asyncio.to_thread(sender.send, plan, targets, pieces())

    async def stop_sending(self, target: SendTarget) -> None:
        """Do nothing: the failure of the trainer ends the transfer."""


class IdleSource:
    """A trainer that offers a model's weights and sends nothing; a WeightSource."""

    def __init__(self, source: Any) -> None:
        self.offer = source.offer

    async def send(self, targets: list[SendTarget], report: Any, every_s: float) -> list[SendResult]:
        return []


@pytest.fixture
def other_server(run_server, tied_model) -> Iterator[Any]:
    with run_server(tied_model) as served:
        yield served


async def test_a_trainer_that_fails_while_weights_are_loaded_leaves_requests_held(other_server, source_of):
    async with VllmClient(other_server.url, other_server.config) as client:
        await client._call("POST", "/collective_rpc", {"method": "use_gloo_for_nccl"})
        source = source_of(other_server.model)
        # The second order is refused before a link opens: a trainer that sends would wait for one for its whole time limit.
        for failing in (BrokenSource(source), IdleSource(source)):
            with pytest.raises(RequestsHeldError, match="start this server again"):
                await send_by_nccl(failing, client, "run:1:1")
