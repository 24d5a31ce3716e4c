"""A TCP link whose bytes go through a relay that loses some, changes some, or stops."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links import tcp_link
from rollmill.tasks.sync.links.link import Rendezvous, join_store, serve_store
from rollmill.tasks.sync.links.tcp_link import (
    TcpReceiver,
    TcpSender,
    checksum,
    decode_address,
    encode_address,
)

HOST, TIMEOUT_S, STALL_S, AT = "127.0.0.1", 20.0, 0.5, 100_000
SIZE = 1 << 20


class Relayed:
    """A store in which links are found at a relay's address."""

    def __init__(self, store: Any, spoil: Callable[[bytes], bytes | None]) -> None:
        self._store, self._spoil = store, spoil
        self._listener = socket.create_server((HOST, 0))

    def get(self, name: str) -> bytes:
        """The relay's address; it has begun."""
        threading.Thread(
            target=self._relay, args=decode_address(self._store.get(name), ""), daemon=True
        ).start()
        return encode_address(self._listener.getsockname(), "").encode()

    def _relay(self, host: str, port: int) -> None:
        with self._listener, socket.create_connection((host, port)) as sender:
            receiver, _ = self._listener.accept()
            with receiver, suppress(ConnectionError):  # a receiver that has seen enough goes
                sender.sendall(receiver.recv(4096))
                n_bytes = 0
                while data := sender.recv(1 << 16):
                    is_there = n_bytes <= AT < n_bytes + len(data)
                    n_bytes += len(data)
                    spoiled = self._spoil(data) if is_there else data
                    if spoiled is None:
                        receiver.settimeout(TIMEOUT_S)
                        receiver.recv(1)  # until the receiver has gone
                        return
                    receiver.sendall(spoiled)


def lose(data: bytes) -> bytes:
    return data[:-3]


def stop(_: bytes) -> None:
    return None


def test_who_connects_and_says_nothing_keeps_no_server_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_link, "_GREETING_S", 0.1)
    store = serve_store(HOST, TIMEOUT_S)
    sender = TcpSender(Rendezvous(store, "link", HOST, TIMEOUT_S, TIMEOUT_S))
    joined = join_store(HOST, store.port, TIMEOUT_S)
    content = torch.randint(0, 255, (SIZE,), dtype=torch.uint8)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(lambda: (sender.open(), sender.send([content])))
        with socket.create_connection(decode_address(joined.get("link"), "")):
            # The sender waits for the receiver TIMEOUT_S, the receiver for a byte a tenth of it.
            receiver = TcpReceiver(Rendezvous(joined, "link", HOST, TIMEOUT_S, TIMEOUT_S / 10))
            receiver.open()
            found = torch.empty(SIZE, dtype=torch.uint8)
            receiver.receive([found])
            sent.result()
    assert torch.equal(found, content)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [(lose, r"bytes were lost on the way|no byte came in"), (stop, r"no byte came in 0\.5 s")],
)
def test_lost_or_withheld_bytes_never_count_as_a_complete_transfer(spoil: Any, complaint: str) -> None:
    store = serve_store(HOST, TIMEOUT_S)
    sender = TcpSender(Rendezvous(store, "link", HOST, TIMEOUT_S, STALL_S))
    joined = Relayed(join_store(HOST, store.port, TIMEOUT_S), spoil)
    receiver = TcpReceiver(Rendezvous(joined, "link", HOST, TIMEOUT_S, STALL_S))  # type: ignore[arg-type]

    def send() -> None:
        sender.open()
        for _ in range(2):
            sender.send([torch.randint(0, 255, (SIZE,), dtype=torch.uint8)])

    def receive() -> None:
        for _ in range(2):
            receiver.receive([torch.empty(SIZE, dtype=torch.uint8)])

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send)
        receiver.open()
        with pytest.raises(SyncError, match=complaint):
            receive()
        receiver.close()
        sent.exception(TIMEOUT_S)
        sender.close()


def views_of(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(each)) for each in parts]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.data())
def test_a_byte_that_is_changed_changes_the_checksum(parts, data) -> None:
    views = views_of(parts)
    before = checksum(views)
    filled = [number for number, view in enumerate(views) if len(view)]
    if filled:
        view = views[data.draw(st.sampled_from(filled))]
        at = data.draw(st.integers(0, len(view) - 1))
        view[at] ^= data.draw(st.integers(1, 255))
        assert checksum(views) != before
