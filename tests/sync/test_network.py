"""Real servers whose weights come through a relay that loses bytes, stops or hangs up, and one that is killed half way."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from rollmill.tasks.errors import RequestError, SyncError
from rollmill.tasks.processes.supervisor import descendants
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import Broadcast, create_prefix
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import join_store, link_name, serve_store
from rollmill.tasks.sync.links.tcp_link import decode_address, encode_address
from rollmill.tasks.sync.weight_messages import SendTarget, WeightOffer
from tests.stubs.parity import largest_difference

pytestmark = pytest.mark.service

HOST, TIMEOUT_S, STALL_S, AT = "127.0.0.1", 60.0, 1.0, 100_000
Spoil = Callable[[bytes], bytes | None]
"""What becomes of the bytes that come after AT others; None: nothing more, and the connection stays."""


class Relay:
    """A store in which a trainer's links are found at addresses of this machine that pass their bytes on.

    Attributes:
        offer: the trainer's, for servers that are to use the relay.
    """

    def __init__(self, offer: WeightOffer) -> None:
        self._trainer, self._streams = (offer.host, offer.port), offer.plan.streams
        self._store = serve_store(HOST, TIMEOUT_S)
        self.offer = replace(offer, port=self._store.port)

    def carry(self, server: VllmClient, spoil: Spoil | None = None) -> SendTarget:
        """A route to one server, whose bytes are spoiled."""
        route, are_open = SendTarget(server.url, "tcp", create_prefix()), threading.Barrier(self._streams)
        for stream in range(self._streams):
            name = link_name(route.prefix, 0, 0, stream)
            threading.Thread(
                target=self._carry, args=(name, route.prefix, spoil, are_open), daemon=True
            ).start()
        return route

    def _carry(self, name: str, secret: str, spoil: Spoil | None, are_open: threading.Barrier) -> None:
        address = decode_address(join_store(*self._trainer, TIMEOUT_S).get(name), secret)
        with socket.create_server((HOST, 0)) as listener:
            self._store.set(name, encode_address(listener.getsockname(), secret))
            receiver, _ = listener.accept()
        # Whoever is at an end may hang up, or be killed.
        with suppress(OSError), receiver, socket.create_connection(address) as sender:
            sender.sendall(receiver.recv(4096))
            are_open.wait(TIMEOUT_S)
            n_bytes = 0
            while data := sender.recv(1 << 14):
                is_there = n_bytes <= AT < n_bytes + len(data)
                n_bytes += len(data)
                passed = spoil(data) if spoil and is_there else data
                if passed is None:
                    receiver.recv(1)  # until the receiver has gone
                    return
                receiver.sendall(passed)


def lose(data: bytes) -> bytes:
    return data[:-3]


def stop(_: bytes) -> None:
    return None


def hang_up(_: bytes) -> bytes:
    raise ConnectionAbortedError


@pytest.fixture
async def client(vllm_server, use_repairs) -> AsyncIterator[VllmClient]:
    async with VllmClient(vllm_server.url, vllm_server.config) as client:
        await use_repairs(client)
        yield client


async def send(
    source: Any,
    offer: WeightOffer,
    routes: dict[VllmClient, SendTarget],
    version: str,
    mode: str = "keep",
    stall_s: float = TIMEOUT_S,
) -> list[Any]:
    """What each server says, or how it failed."""
    config = SyncConfig(timeout_s=TIMEOUT_S, stall_timeout_s=stall_s, mode=mode)
    broadcast = Broadcast(source, offer, routes, version, config)
    async with asyncio.timeout(TIMEOUT_S):
        _, *answers = await asyncio.gather(
            broadcast.send(), *map(broadcast.update_server, routes), return_exceptions=True
        )
    return answers


@pytest.mark.parametrize(
    ("spoil", "mode"), [(stop, "keep"), (lose, "keep"), (lose, "second_copy"), (hang_up, "second_copy")]
)
async def test_a_network_that_fails_half_way_leaves_the_old_weights_serving(
    client, vllm_server, source_of, sequences, spoil: Spoil, mode: str
) -> None:
    old, new = source_of(vllm_server.model), source_of(vllm_server.model)
    old.change(seed=70)
    new.change(seed=71)
    relay = Relay(await old.offer())
    (taken,) = await send(old, relay.offer, {client: relay.carry(client)}, "run:1:0", mode)
    assert taken.bytes > 2 * AT
    relay = Relay(await new.offer())
    (failed,) = await send(new, relay.offer, {client: relay.carry(client, spoil)}, "run:1:1", mode, STALL_S)
    assert isinstance(failed, SyncError), failed
    assert "the old weights serve: bucket" in str(failed)
    assert await client.version() == "run:1:0"
    assert await largest_difference(old, client, sequences, "run:1:0") <= 1e-4
    await send(new, relay.offer, {client: relay.carry(client)}, "run:1:2", mode)
    assert await client.version() == "run:1:2"
    assert await largest_difference(new, client, sequences, "run:1:2") <= 1e-4


@pytest.fixture
def lone_server(run_server, tied_model) -> Iterator[Any]:
    with run_server(tied_model) as served:
        yield served


async def test_a_server_killed_during_a_transfer_does_not_delay_another(
    client, lone_server, source_of, sequences
) -> None:
    source = source_of(lone_server.model)
    source.change(seed=72)
    relay = Relay(await source.offer())
    async with VllmClient(lone_server.url, lone_server.config) as dying:

        def kill(_: bytes) -> None:
            for pid in descendants(lone_server.process.pid):
                os.kill(pid, signal.SIGKILL)

        routes = {dying: relay.carry(dying, kill), client: relay.carry(client)}
        failed, taken = await send(source, relay.offer, routes, "run:1:1")
        assert isinstance(failed, SyncError | RequestError), failed
        assert not await dying.is_healthy()
    assert taken.bytes > 2 * AT
    for version in ("run:1:1", "run:1:2"):
        assert await client.version() == version
        assert await largest_difference(source, client, sequences, version) <= 1e-4
        source.change(seed=73)
        await send(source, relay.offer, {client: routes[client]}, "run:1:2")
