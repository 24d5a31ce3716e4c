"""Orders at a real vLLM server: for a comparison, for weights in files, and such that fail half-way."""

import asyncio
import hashlib
import http.server
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from rollmill.tasks.errors import RequestError
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import create_prefix
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import Rendezvous, join_store, link_name
from rollmill.tasks.sync.links.tcp_link import TcpSender
from rollmill.tasks.sync.weight_messages import (
    SendTarget,
    WeightUpdateRequest,
    WeightUpdateResponse,
    encode_plan,
)
from tests.stubs.one_server_sync import send_to_server
from tests.stubs.parity import largest_difference

pytestmark = pytest.mark.service

TIMEOUT_S = 60.0


@pytest.fixture
async def client(vllm_server, use_repairs) -> AsyncIterator[VllmClient]:
    async with VllmClient(vllm_server.url, vllm_server.config) as client:
        await use_repairs(client)
        yield client


async def order_of(source, version: str, **changes: Any) -> WeightUpdateRequest:
    offer = await source.offer()
    settings = {"mode": "keep", "transport": "tcp", "timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
    places = {
        "host": offer.host,
        "port": offer.port,
        "prefix": create_prefix(),
        "plan": encode_plan(offer.plan),
    }
    return WeightUpdateRequest(**{"version": version} | settings | places | changes)


async def give(client: VllmClient, order: WeightUpdateRequest) -> WeightUpdateResponse:
    response = await client.update_weights(msgspec.json.encode(order), TIMEOUT_S)
    return msgspec.json.decode(response, type=WeightUpdateResponse)


async def send(source, client: VllmClient, version: str, **changes: Any) -> WeightUpdateResponse:
    order = await order_of(source, version, **changes)
    answer, (sent,) = await asyncio.gather(
        give(client, order), source.send([SendTarget(client.url, "tcp", order.prefix)], print, TIMEOUT_S)
    )
    assert not sent.error
    return answer


def opened(order: WeightUpdateRequest) -> list[TcpSender]:
    """A sender's links, which the server has joined: it takes the order."""
    store = join_store(order.host, order.port, TIMEOUT_S)
    names = [link_name(order.prefix, 0, 0, stream) for stream in range(order.decode_plan().streams)]
    links = [
        TcpSender(Rendezvous(store, name, order.host, TIMEOUT_S, TIMEOUT_S, secret=order.prefix))
        for name in names
    ]
    for link in links:
        link.open()
    return links


@pytest.fixture
async def source(vllm_server, client, source_of) -> Any:
    """A trainer whose weights the server has, under the name run:1:0."""
    source = source_of(vllm_server.model)
    source.change(seed=80)
    answer = await send(source, client, "run:1:0")
    assert (answer.differing, answer.uncompared) == ((), ())
    return source


async def test_verification_names_the_tensors_in_which_the_live_model_differs(
    client, source, sequences, use_repairs
):
    norm = source.model.model.norm.weight
    assert not (await send(source, client, "run:1:0", mode="verify")).differing
    with torch.no_grad():
        norm[3] += 1e-6
    assert [*(await send(source, client, "run:1:0", mode="verify")).differing] == ["model.norm"]
    source.change(seed=81)
    await use_repairs(client, ("repack_experts",))
    (stale,) = (await send(source, client, "run:1:1")).differing
    assert stale in ("lm_head", "model.embed_tokens")
    await use_repairs(client)
    answer = await send(source, client, "run:1:1", mode="verify")
    assert set(answer.differing) & {"lm_head", "model.embed_tokens"}
    assert len(answer.differing) == 1
    assert await client.version() == "run:1:1"


async def test_checksums_are_of_the_tensors_as_they_arrived(client, source):
    weights = dict(source.model.named_parameters())
    names = ("model.embed_tokens.weight", "model.norm.weight")
    answer = await send(source, client, "run:1:1", mode="second_copy", checksums=names)
    sent = {name: hashlib.sha256(weights[name].detach().numpy().tobytes()).hexdigest() for name in names}
    assert answer.checksums == sent


@pytest.fixture
def serve_folder() -> Iterator[Callable[[Path], str]]:
    servers = []

    def serving(folder: Path) -> str:
        handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serving
    for each in servers:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize("by", ["path", "address"])
async def test_weights_in_files_are_loaded_as_those_that_are_sent(
    client, source, sequences, serve_folder, tmp_path, by: str
):
    source.change(seed=82)
    weights = dict(source.model.named_parameters())
    names = sorted(weights)
    for number in (0, 1):
        save_file(
            {name: weights[name].detach() for name in names[number::2]}, tmp_path / f"{number}.safetensors"
        )
    place = str(tmp_path) if by == "path" else serve_folder(tmp_path)
    files = tuple(f"{place}/{number}.safetensors" for number in (0, 1))
    await give(client, await order_of(source, "run:1:1", transport="files", files=files))
    assert await largest_difference(source, client, sequences, "run:1:1") <= 1e-4
    assert await client.version() == "run:1:1"
    missing = await order_of(source, "run:1:2", transport="files", files=files[:1])
    with pytest.raises(RequestError, match=r"the old weights serve: .*: no tensor"):
        await give(client, missing)
    assert await largest_difference(source, client, sequences, "run:1:1") <= 1e-4


@pytest.mark.parametrize("mode", ["keep", "second_copy"])
async def test_a_sender_that_dies_half_way_leaves_the_old_weights_serving(
    client, source, source_of, vllm_server, sequences, mode: str
):
    new = source_of(vllm_server.model)
    new.change(seed=83)
    order = await order_of(new, "run:1:1", mode=mode)

    def send_half() -> None:
        links = opened(order)
        bucket = order.decode_plan().buckets(0)[0]
        links[0].send([torch.zeros(bucket.size_bytes // 2, dtype=torch.uint8)])
        for link in links:
            link.close()

    with pytest.raises(RequestError, match="the old weights serve"):
        await asyncio.gather(give(client, order), asyncio.to_thread(send_half))
    assert await client.version() == "run:1:0"
    assert await largest_difference(source, client, sequences, "run:1:0") <= 1e-4
    await send(new, client, "run:1:2", mode=mode)
    assert await largest_difference(new, client, sequences, "run:1:2") <= 1e-4


async def test_a_server_serves_while_it_waits_for_weights_and_takes_one_order_at_a_time(
    client, source, sequences
):
    order = await order_of(source, "run:1:1")
    waiting = asyncio.ensure_future(give(client, order))
    links = await asyncio.to_thread(opened, order)
    with pytest.raises(RequestError, match=r"still receiving version run:1:1"):
        await give(client, await order_of(source, "run:1:2"))
    assert await client.is_healthy()
    assert await largest_difference(source, client, sequences, "run:1:0") <= 1e-4
    for link in links:
        link.close()
    with pytest.raises(RequestError, match="the old weights serve: bucket"):
        await waiting
    await send(source, client, "run:1:3")
    assert await client.version() == "run:1:3"


async def test_an_order_without_a_sender_ends_at_its_deadline(client, source):
    with pytest.raises(RequestError, match=r"the old weights serve: .*in 0\.5 s"):
        await give(client, await order_of(source, "run:1:1", timeout_s=0.5))
    await send(source, client, "run:1:2")
    assert await client.version() == "run:1:2"


async def test_an_order_ends_with_the_connection_of_its_sender(client, source):
    order = await order_of(source, "run:1:1", timeout_s=100 * TIMEOUT_S)
    giving = asyncio.ensure_future(give(client, order))
    links = await asyncio.to_thread(opened, order)
    await client.close()
    with pytest.raises(RequestError):
        await giving
    async with asyncio.timeout(TIMEOUT_S):
        await until_nothing_is_taken(client, await order_of(source, "run:1:2", transport="files"))
    for link in links:
        link.close()
    await send(source, client, "run:1:2")
    assert await client.version() == "run:1:2"


async def until_nothing_is_taken(client: VllmClient, order: WeightUpdateRequest) -> None:
    """Give an order of no files, until it is refused for its own sake."""
    while True:
        with pytest.raises(RequestError) as refused:
            await give(client, order)
        if "still receiving version" not in str(refused.value):
            return


@pytest.fixture
def lone_server(run_server, tied_model) -> Iterator[Any]:
    with run_server(tied_model) as served:
        yield served


@pytest.mark.long
async def test_a_server_that_failed_half_way_holds_requests_and_has_no_policy_version(lone_server, source_of):
    async with VllmClient(lone_server.url, lone_server.config) as client:
        source = source_of(lone_server.model)
        order = await order_of(source, "run:1:1")
        plan = order.decode_plan()
        tensors = [replace(each, name=each.name.replace("layers.1.", "layers.9.")) for each in plan.tensors]
        unknown = replace(order, plan=encode_plan(replace(plan, tensors=tuple(tensors))))
        with pytest.raises(RequestError, match="requests stay held, start this server again"):
            await asyncio.gather(
                give(client, unknown),
                source.send([SendTarget(client.url, "tcp", order.prefix)], print, TIMEOUT_S),
            )
        assert await client.version() == "unusable"
        with pytest.raises(RequestError, match="an earlier update failed"):
            await give(client, await order_of(source, "run:1:2"))


@pytest.fixture
def parallel_server(run_server, save_tiny) -> Iterator[Any]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = save_tiny(Qwen2ForCausalLM, Qwen2Config, num_key_value_heads=2, tie_word_embeddings=True)
    parallel = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    # vLLM's CPU build needs a NUMA node for each worker unless the cores of each worker are given.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with run_server(model, extra_args=parallel) as served:
            yield served


@pytest.mark.long
async def test_the_workers_of_a_tensor_parallel_server_share_weights_that_one_of_them_receives(
    parallel_server, source_of, sequences, tmp_path
):
    async with VllmClient(parallel_server.url, parallel_server.config) as client:
        source = source_of(parallel_server.model)
        for number, (mode, transport) in enumerate(
            [("keep", "tcp"), ("keep", "shm"), ("second_copy", "tcp"), ("second_copy", "tcp")]
        ):
            source.change(seed=90 + number)
            config = SyncConfig(mode=mode, transport=transport)
            answer = await send_to_server(source, client, f"run:1:{number}", config, create_prefix())
            assert answer.bytes == (await source.offer()).plan.total_bytes
            assert await largest_difference(source, client, sequences, f"run:1:{number}") <= 1e-4
        lost = str(tmp_path / "lost.safetensors")
        with pytest.raises(RequestError, match=r"the old weights serve: .* is not a complete file"):
            await give(client, await order_of(source, "run:1:5", transport="files", files=(lost,)))
        assert await client.version() == "run:1:3"
        await send_to_server(source, client, "run:1:6", SyncConfig(transport="tcp"), create_prefix())
        assert await largest_difference(source, client, sequences, "run:1:6") <= 1e-4
