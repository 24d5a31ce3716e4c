"""A vLLM server that receives changes of weights computes with exactly the trainer's; gloo replaces NCCL."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from rollmill.tasks.errors import RequestError
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import create_prefix
from rollmill.tasks.sync.changed_buckets import SentCopy
from rollmill.tasks.sync.links.weight_files import encode_weight_file
from rollmill.tasks.sync.weight_messages import (
    SendTarget,
    WeightUpdateRequest,
    WeightUpdateResponse,
    encode_plan,
)
from rollmill.tasks.train.checkpoints.tensor_digests import hash_tensor
from tests.sync.gloo_as_nccl import GlooAsNccl

pytestmark = pytest.mark.service

TIMEOUT_S = 60.0


class Route:
    """The links from a trainer's end to a server, and the snapshot that the server holds."""

    def __init__(self, source: Any, client: VllmClient, transport: str = "tcp") -> None:
        self.source, self.client = source, client
        self.target = SendTarget(client.url, transport, create_prefix())

    async def send(self, version: str, snapshot: str, mode: str = "keep") -> WeightUpdateResponse:
        """Send the trainer's weights; the response has the checksums of all tensors."""
        target = replace(self.target, snapshot=snapshot)
        request = await self.request(target, version, mode)
        answer, (sent,) = await asyncio.gather(
            self.client.update_weights(request, TIMEOUT_S), self.source.send([target], print, TIMEOUT_S)
        )
        response = msgspec.json.decode(answer, type=WeightUpdateResponse)
        assert (sent.error, sent.bytes, response.snapshot) == ("", response.bytes, snapshot)
        self.target = replace(target, base_snapshot=snapshot)
        return response

    async def request(self, target: SendTarget, version: str, mode: str, files: Sequence[str] = ()) -> bytes:
        offer = await self.source.offer()
        request = WeightUpdateRequest(
            version=version,
            mode=mode,
            transport=target.transport,
            plan=encode_plan(offer.plan),
            timeout_s=TIMEOUT_S,
            stall_timeout_s=TIMEOUT_S,
            host=offer.host,
            port=offer.port,
            prefix=target.prefix,
            files=tuple(files),
            checksums=tuple(each.name for each in offer.plan.tensors),
            snapshot=target.snapshot,
            base_snapshot=target.base_snapshot,
        )
        return msgspec.json.encode(request)


def step(source: Any, seed: int, share: float = 0.02) -> None:
    """Change some elements of the trainer's weights a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in source.model.parameters():
            each.mul_(1 + 0.3 * (torch.rand(each.shape, generator=generator) < share))


def digests(source: Any) -> dict[str, str]:
    weights = dict(source.model.named_parameters())
    return {name: hash_tensor(each.detach()) for name, each in weights.items() if name != "lm_head.weight"}


@pytest.fixture
async def client(vllm_server, use_repairs) -> AsyncIterator[VllmClient]:
    async with VllmClient(vllm_server.url, vllm_server.config) as client:
        await use_repairs(client)
        yield client


@pytest.mark.parametrize(
    ("transport", "mode"),
    [("tcp", "keep"), ("tcp", "second_copy"), ("nccl", "keep"), ("nccl", "second_copy")],
)
async def test_a_server_that_gets_changes_has_the_trainers_weights_bit_by_bit(
    vllm_server, client, source_of, monkeypatch: pytest.MonkeyPatch, transport: str, mode: str
) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", GlooAsNccl, raising=False)
    await client._call("POST", "/collective_rpc", {"method": "use_gloo_for_nccl"})
    source = source_of(vllm_server.model)
    route, n_bytes = Route(source, client, transport), (await source.offer()).plan.total_bytes
    assert (await route.send("run:1:0", "0", mode)).bytes == n_bytes
    for number in range(1, 4):
        step(source, number)
        sent = await route.send(f"run:1:{number}", str(number), mode)
        assert sent.bytes < n_bytes / 5
        assert (sent.checksums, sent.differing, sent.uncompared) == (digests(source), (), ())
        verified = await route.send(f"run:1:{number}", f"{number} verified", "verify")
        assert verified.bytes < n_bytes / 100
        assert (verified.checksums, verified.differing) == (digests(source), ())


async def test_a_server_that_reads_files_of_changes_has_the_trainers_weights_bit_by_bit(
    vllm_server, client, source_of, tmp_path: Path
) -> None:
    source, copy = source_of(vllm_server.model), SentCopy()
    route, plan = Route(source, client), (await source.offer()).plan
    names, sizes = [each.name for each in plan.tensors], []
    for number in range(3):
        step(source, number)
        weights = {name: source.model.get_parameter(name).detach().clone() for name in names}
        snapshot, base = str(number), str(number - 1) if number else ""
        tensors, metadata = encode_weight_file(weights, copy, plan, snapshot, base)
        path = tmp_path / f"{number}.safetensors"
        save_file(tensors, path, metadata)
        target = replace(route.target, transport="files", snapshot=snapshot, base_snapshot=base)
        request = await route.request(target, f"run:1:{number}", "keep", [str(path)])
        response = msgspec.json.decode(
            await client.update_weights(request, TIMEOUT_S), type=WeightUpdateResponse
        )
        assert (response.snapshot, response.differing, response.uncompared) == (snapshot, (), ())
        assert response.checksums == digests(source)
        sizes.append(response.bytes)
    assert max(sizes[1:]) < sizes[0] / 5


@pytest.fixture
async def restarted(run_server, tied_model, use_repairs) -> AsyncIterator[VllmClient]:
    """A server that has just started."""
    with ThreadPoolExecutor(1) as thread:
        starting = run_server(tied_model)
        served = await asyncio.wrap_future(thread.submit(starting.__enter__))
        async with VllmClient(served.url, served.config) as client:
            await use_repairs(client)
            yield client
        starting.__exit__(None, None, None)


async def test_a_restarted_server_refuses_changes_and_takes_the_whole(
    restarted, tied_model, source_of
) -> None:
    source = source_of(tied_model)
    route = Route(source, restarted)
    before = replace(route.target, snapshot="1", base_snapshot="before the restart")
    with pytest.raises(RequestError, match=r"the old weights serve: .* this server holds none"):
        await restarted.update_weights(await route.request(before, "run:1:1", "keep"), TIMEOUT_S)
    whole = (await route.send("run:1:1", "1")).bytes
    step(source, 1)
    assert (await route.send("run:1:2", "2")).bytes < whole / 5
    verified = await route.send("run:1:2", "2", "verify")
    assert (verified.checksums, verified.differing) == (digests(source), ())
