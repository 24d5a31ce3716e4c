"""A link of one TCP connection, which sends and receives in place, without a copy of the weights.

A frame is a head and the parts of a bucket. The head has the frame's number on this connection, its size and a checksum,
so that bytes which a network loses, repeats or changes are noticed.

Both ends prove that they know the rendezvous's secret: the sender signs its address in the store, the receiver its greeting.
What follows is neither signed nor encrypted.
"""

import hmac
import json
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address

import numpy as np
import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links.link import Rendezvous, Stalls

_HEAD = struct.Struct("!8sQQQ")
_CHECKED, _UNCHECKED = b"rollmill", b"loopback"
# Linux's UIO_MAXIOV: a system call with more parts fails.
_MOST_PARTS = 1024
# Time that who connects has to greet, in seconds.
_GREETING_S = 2.0
# Between two syncs a link is silent for minutes: probes notice a dead end, and keep a firewall's entry alive.
_IDLE_S = 30


class _TcpConnection:
    """Base of both ends of a TCP link: a socket whose calls fail after `stall_timeout_s` without a byte."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous, self.stalls = rendezvous, Stalls()
        self._frame = 0
        self._is_checked = True
        self._is_closed = False
        self._socket: socket.socket | None = None
        self._in_use = threading.Lock()

    def close(self) -> None:
        """Close the link as `SendingLink.close`; calls in other threads have ended when it returns."""
        self._is_closed = True
        # The shutdown ends a call in another thread, which holds the lock until then.
        if self._socket is not None:
            with suppress(OSError):
                # It is not connected, or closed.
                self._socket.shutdown(socket.SHUT_RDWR)
        with self._in_use:
            if self._socket is not None:
                self._socket.close()

    def _use(self, connection: socket.socket) -> None:
        self._socket = connection
        # Over loopback there is no network to lose bytes, and reading memory twice for a checksum is what would limit.
        self._is_checked = not ip_address(connection.getpeername()[0]).is_loopback
        seconds = self._rendezvous.stall_timeout_s
        limit = struct.pack("ll", int(seconds), int(math.modf(seconds)[0] * 1e6))
        # The kernel's limits, since a socket with Python's timeout does not block, and MSG_WAITALL returns early then.
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @contextmanager
    def _raise_sync_errors(self, silence: str) -> Iterator[None]:
        """Convert errors of the socket to SyncError; `silence` says what did not happen within the time limit."""
        try:
            yield
        except BlockingIOError as error:
            limit = f"{self._rendezvous.stall_timeout_s:g} s (sync.stall_timeout_s)"
            raise SyncError(f"{silence} in {limit}") from error
        except OSError as error:
            raise SyncError(f"the connection broke: {error}") from error

    def _get_socket(self) -> socket.socket:
        if self._socket is None or self._is_closed:
            raise SyncError("the link is closed")
        return self._socket


class TcpSender(_TcpConnection):
    """The trainer's end of a TCP link; `open` listens at a free port, which it publishes in the rendezvous, for one receiver.

    See `SendingLink` for the interface. `Rendezvous` has the time limits and the secret.
    """

    def open(self) -> None:
        """Wait until the receiver connects, as `SendingLink.open`."""
        rendezvous = self._rendezvous
        with self._in_use:
            try:
                self._use(self._accept_receiver())
            except (OSError, RuntimeError) as error:
                raise SyncError(
                    f"no receiver came for {rendezvous.name} in {rendezvous.timeout_s:g} s (sync.timeout_s): {error}"
                ) from error

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send one bucket as a frame, with a checksum unless the connection is on loopback, as `SendingLink.send`."""
        views = [part.numpy().data for part in parts if part.numel()]
        size = sum(map(len, views))
        checked = (_CHECKED, checksum(views)) if self._is_checked else (_UNCHECKED, 0)
        head = _HEAD.pack(checked[0], self._frame, size, checked[1])
        with self._in_use, self._raise_sync_errors("it took no byte"):
            exchange(partial(self._send_some, self._get_socket()), [memoryview(head), *views])
            self._frame += 1

    def _send_some(self, connection: socket.socket, views: Sequence[memoryview]) -> int:
        """Send as much of the views as the socket has room for; returns the number of bytes, 0 after a wait for room.

        Raises BlockingIOError if there is no room within `stall_timeout_s`.
        """
        with suppress(BlockingIOError):
            return connection.sendmsg(views, (), socket.MSG_DONTWAIT)
        room = select.poll()
        room.register(connection, select.POLLOUT)
        with self.stalls.watch():
            if not room.poll(1e3 * self._rendezvous.stall_timeout_s):
                raise BlockingIOError("there is no room")
        return 0

    def _accept_receiver(self) -> socket.socket:
        rendezvous, deadline = self._rendezvous, time.monotonic() + self._rendezvous.timeout_s
        family = socket.AF_INET6 if ":" in rendezvous.address else socket.AF_INET
        with socket.create_server((rendezvous.address, 0), family=family) as listener:
            # Stored before the check, so that `close` either ends the wait for a receiver or is noticed here.
            self._socket = listener
            rendezvous.store.set(rendezvous.name, encode_address(listener.getsockname(), rendezvous.secret))
            if self._is_closed:
                raise ConnectionAbortedError("the link is closed")
            connection = _accept_greeting(listener, rendezvous, deadline)
            rendezvous.store.delete_key(rendezvous.name)
            return connection


class TcpReceiver(_TcpConnection):
    """The server's end of a TCP link: connects to the address that the sender has published in the store."""

    def open(self) -> None:
        """Connect to the sender, as `ReceivingLink.open`."""
        rendezvous = self._rendezvous
        try:
            address = decode_address(rendezvous.store.get(rendezvous.name), rendezvous.secret)
            connection = socket.create_connection(address, rendezvous.timeout_s)
            self._use(connection)
            connection.sendall(_greeting(rendezvous))
        except (OSError, RuntimeError) as error:
            raise SyncError(
                f"the trainer was not there for {rendezvous.name} in {rendezvous.timeout_s:g} s (sync.timeout_s): {error}"
            ) from error
        # `close` may have been called before there was a socket to close.
        if self._is_closed:
            self.close()
            raise SyncError("the link is closed")

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """Receive one bucket, and check its frame and checksum, as `ReceivingLink.receive`."""
        views = [part.numpy().data for part in parts if part.numel()]
        head, size = bytearray(_HEAD.size), sum(map(len, views))
        with self._in_use, self._raise_sync_errors("no byte came"):
            call = partial(receive_some, self._get_socket())
            with self.stalls.watch():
                exchange(call, [memoryview(head)])
            kind, *found, expected = _HEAD.unpack(head)
            if kind != (_CHECKED if self._is_checked else _UNCHECKED) or found != [self._frame, size]:
                raise SyncError(
                    f"expected frame {self._frame} of {size} bytes, got {bytes(head)!r}: bytes were lost on the way"
                )
            self._frame += 1
            exchange(call, views)
        if self._is_checked and (sum_found := checksum(views)) != expected:
            raise SyncError(
                f"{size} bytes have the checksum {sum_found:016x}, the sender's have {expected:016x}: "
                "bytes were changed on the way"
            )


def checksum(views: Sequence[memoryview]) -> int:
    """Sum up all parts' 8-byte words, and the remaining bytes of each part, modulo 2**64; as fast as memory is read."""
    total = 0
    for view in views:
        whole = len(view) // 8 * 8
        total += int(np.frombuffer(view[:whole], np.uint64).sum())
        total += int.from_bytes(view[whole:], "little")
    return total % 2**64


def exchange(call: Callable[[Sequence[memoryview]], int], views: Sequence[memoryview]) -> None:
    """Send, or receive, all bytes of all views; `call` does so with as much as it can and returns the number of bytes."""
    first, waiting = 0, list(views)
    while first < len(waiting):
        n_bytes = call(waiting[first : first + _MOST_PARTS])
        # A call may end in the middle of a part, whose rest is the next call's first.
        while first < len(waiting) and n_bytes >= len(waiting[first]):
            n_bytes -= len(waiting[first])
            first += 1
        if n_bytes:
            waiting[first] = waiting[first][n_bytes:]


def receive_some(connection: socket.socket, views: Sequence[memoryview]) -> int:
    """Receive into views until they are full; returns the number of bytes.

    Raises BlockingIOError after `stall_timeout_s` of silence, ConnectionResetError if the sender has closed the connection.
    """
    n_bytes = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
    if not n_bytes:
        raise ConnectionResetError("the other end is gone")
    return n_bytes


def encode_address(address: Sequence[str | int], secret: str) -> str:
    """Return the store's entry for a sender's address (host, port): JSON, signed with the secret."""
    host, port, *_ = address
    return json.dumps([host, port, _sign(secret, f"sender {host} {port}").hex()])


def decode_address(entry: bytes, secret: str) -> tuple[str, int]:
    """Return the address in an entry of the store; raises ConnectionRefusedError unless `encode_address` made it with the secret."""
    try:
        host, port, _ = json.loads(entry)
        expected = encode_address((host, port), secret).encode()
    except (ValueError, TypeError) as error:
        raise ConnectionRefusedError(f"the store has no address: {error}") from error
    if not hmac.compare_digest(entry, expected):
        raise ConnectionRefusedError("the address in the store is not the trainer's")
    return host, port


def _sign(secret: str, text: str) -> bytes:
    """Return the HMAC-SHA256 of a text, 32 bytes."""
    return hmac.digest(secret.encode(), text.encode(), "sha256")


def _greeting(rendezvous: Rendezvous) -> bytes:
    return _sign(rendezvous.secret, f"receiver {rendezvous.name}")


def _accept_greeting(listener: socket.socket, rendezvous: Rendezvous, deadline: float) -> socket.socket:
    """Accept connections until one greets with the link's secret, and return that one; others are closed."""
    expected = _greeting(rendezvous)
    while True:
        # A timeout of 0 would make the socket non-blocking.
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        # While a stranger says nothing, the receiver waits.
        connection.settimeout(max(min(deadline - time.monotonic(), _GREETING_S), 0.001))
        # Anyone who reaches the port can connect; only the receiver knows the secret.
        found = bytearray(len(expected))
        with suppress(OSError):
            # It went away, or says nothing.
            exchange(partial(receive_some, connection), [memoryview(found)])
        if hmac.compare_digest(found, expected):
            return connection
        connection.close()
