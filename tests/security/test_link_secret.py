"""Whoever reads and writes the store of a sync can take no TCP link's weights and give a server no others."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.broadcast import create_prefix
from rollmill.tasks.sync.links.link import Rendezvous, join_store, link_name, serve_store
from rollmill.tasks.sync.links.tcp_link import TcpReceiver, TcpSender

HOST, TIMEOUT_S = "127.0.0.1", 60.0


@pytest.fixture
def store() -> Any:
    return serve_store(HOST, TIMEOUT_S)


def at(store: Any, prefix: str) -> Rendezvous:
    """What an end of the link knows that has the prefix from its order."""
    joined = join_store(HOST, store.port, TIMEOUT_S)
    return Rendezvous(joined, link_name(prefix, 0, 0, 0), HOST, TIMEOUT_S, TIMEOUT_S, secret=prefix)


def test_what_the_store_shows_does_not_open_the_link(store: Any) -> None:
    prefix = create_prefix()
    sender, receiver = TcpSender(at(store, prefix)), TcpReceiver(at(store, prefix))
    with ThreadPoolExecutor(1) as thread:
        opened = thread.submit(sender.open)
        store.wait([link_name(prefix, 0, 0, 0)])
        (name,) = [key for key in store.list_keys() if key.endswith("/0/0/0")]
        assert prefix not in name
        host, port, *_ = json.loads(store.get(name))
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(len(name).to_bytes(4) + name.encode())
            stranger.settimeout(TIMEOUT_S)
            # The sender hangs up: it resets a connection with unread bytes.
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        receiver.open()
        opened.result(TIMEOUT_S)
        sent, found = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        sending = thread.submit(sender.send, [sent])
        receiver.receive([found])
        sending.result(TIMEOUT_S)
    assert found.tolist() == sent.tolist()
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    "entry", ['["{host}", {port}]', '["{host}", {port}, "' + 64 * "0" + '"]', "[", "7", "[[], 1, 2]"]
)
def test_server_connects_to_no_address_that_the_trainer_has_not_signed(store: Any, entry: str) -> None:
    end = at(store, create_prefix())
    with socket.create_server((HOST, 0)) as stranger:
        host, port = stranger.getsockname()
        store.set(end.name, entry.replace("{host}", host).replace("{port}", str(port)))
        with pytest.raises(SyncError, match=r"the address in the store is not|the store has no address"):
            TcpReceiver(end).open()
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_address_signed_with_another_secret_is_refused(store: Any) -> None:
    end, other = at(store, create_prefix()), at(store, create_prefix())
    waiting = TcpSender(other)
    with ThreadPoolExecutor(1) as thread:
        opened = thread.submit(waiting.open)
        store.wait([other.name])
        store.set(end.name, store.get(other.name).decode())
        with pytest.raises(SyncError, match="not the trainer's"):
            TcpReceiver(end).open()
        waiting.close()
        assert isinstance(opened.exception(TIMEOUT_S), SyncError)
