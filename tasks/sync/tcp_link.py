"""A link of one TCP connection: bytes go from where they lie to where they belong, without a copy between.

A frame is a head and the parts of a bucket. The head has the frame's number on this connection, its size and a checksum,
so that bytes which a network loses, repeats or changes are noticed. Over loopback, where there is no network and memory is
what limits, frames have no checksum.
"""

import json
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address

import numpy as np
import torch

from tasks.errors import SyncError
from tasks.sync.link import Meeting, Stalls

_HEAD = struct.Struct("!8sQQQ")
_CHECKED, _UNCHECKED = b"rollmill", b"loopback"
_MOST_PARTS = 1024
"""Parts of one system call: Linux's UIO_MAXIOV."""
_IDLE_S = 30
"""Seconds of silence after which the kernel asks whether the other end is there, and keeps a middlebox's entry alive."""

_Call = Callable[[Sequence[memoryview]], int]
"""Sends from views, or receives into them; the number of bytes."""


class _Connection:
    """What both ends have: a socket with a limit on silence, and the number of the next frame."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self.stalls = meeting, Stalls()
        self._frame = 0
        self._is_checked = True
        self._is_closed = False
        self._socket: socket.socket | None = None
        self._in_use = threading.Lock()

    def close(self) -> None:
        """See the seam; a call under way in another thread has ended when it returns."""
        self._is_closed = True
        if self._socket is not None:
            with suppress(OSError):  # it is not connected, or closed
                self._socket.shutdown(socket.SHUT_RDWR)
        with self._in_use:
            if self._socket is not None:
                self._socket.close()

    def _use(self, connection: socket.socket) -> None:
        self._socket = connection
        self._is_checked = not ip_address(connection.getpeername()[0]).is_loopback
        seconds = self._meeting.stall_timeout_s
        limit = struct.pack("ll", int(seconds), int(math.modf(seconds)[0] * 1e6))
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @contextmanager
    def _told(self, silence: str) -> Iterator[None]:
        """Errors of the socket as what they mean."""
        try:
            yield
        except BlockingIOError as error:
            limit = f"{self._meeting.stall_timeout_s:g} s (sync.stall_timeout_s)"
            raise SyncError(f"{silence} in {limit}") from error
        except OSError as error:
            raise SyncError(f"the connection broke: {error}") from error

    def _opened(self) -> socket.socket:
        if self._socket is None or self._is_closed:
            raise SyncError("the link is closed")
        return self._socket


class TcpSender(_Connection):
    """The trainer's end: listens at a port of its own until the receiver has come."""

    def open(self) -> None:
        """See the seam."""
        meeting = self._meeting
        with self._in_use:
            try:
                self._use(self._met())
            except (OSError, RuntimeError) as error:
                raise SyncError(
                    f"no receiver came for {meeting.name} in {meeting.timeout_s:g} s (sync.timeout_s): {error}"
                ) from error

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """See the seam."""
        views = [part.numpy().data for part in parts if part.numel()]
        size = sum(map(len, views))
        checked = (_CHECKED, checksum(views)) if self._is_checked else (_UNCHECKED, 0)
        head = _HEAD.pack(checked[0], self._frame, size, checked[1])
        with self._in_use, self._told("it took no byte"):
            _exchange(_sent(self._opened(), self._meeting, self.stalls), [memoryview(head), *views])
            self._frame += 1

    def _met(self) -> socket.socket:
        meeting, deadline = self._meeting, time.monotonic() + self._meeting.timeout_s
        family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
        with socket.create_server((meeting.address, 0), family=family) as listener:
            self._socket = listener
            meeting.store.set(meeting.name, json.dumps(listener.getsockname()[:2]))
            if self._is_closed:
                raise ConnectionAbortedError("the link is closed")
            connection = _accepted(listener, meeting.name, deadline)
            meeting.store.delete_key(meeting.name)
            return connection


class TcpReceiver(_Connection):
    """The server's end."""

    def open(self) -> None:
        """See the seam."""
        meeting = self._meeting
        try:
            host, port = json.loads(meeting.store.get(meeting.name))
            connection = socket.create_connection((host, port), meeting.timeout_s)
            self._use(connection)
            connection.sendall(_greeting(meeting.name))
        except (OSError, RuntimeError) as error:
            raise SyncError(
                f"the trainer was not there for {meeting.name} in {meeting.timeout_s:g} s (sync.timeout_s): {error}"
            ) from error
        if self._is_closed:
            self.close()
            raise SyncError("the link is closed")

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """See the seam."""
        views = [part.numpy().data for part in parts if part.numel()]
        head, size = bytearray(_HEAD.size), sum(map(len, views))
        with self._in_use, self._told("no byte came"):
            call = _received(self._opened())
            with self.stalls.watched():
                _exchange(call, [memoryview(head)])
            kind, *found, expected = _HEAD.unpack(head)
            if kind != (_CHECKED if self._is_checked else _UNCHECKED) or found != [self._frame, size]:
                raise SyncError(
                    f"expected frame {self._frame} of {size} bytes, got {bytes(head)!r}: bytes were lost on the way"
                )
            self._frame += 1
            _exchange(call, views)
        if self._is_checked and (sum_found := checksum(views)) != expected:
            raise SyncError(
                f"{size} bytes have the checksum {sum_found:016x}, the sender's have {expected:016x}: "
                "bytes were changed on the way"
            )


def checksum(views: Sequence[memoryview]) -> int:
    """Sum of all parts' 8-byte words, and of what is left of each, modulo 2**64: at the speed of memory."""
    total = 0
    for view in views:
        whole = len(view) // 8 * 8
        total += int(np.frombuffer(view[:whole], np.uint64).sum())
        total += int.from_bytes(view[whole:], "little")
    return total % 2**64


def _exchange(call: _Call, views: Sequence[memoryview]) -> None:
    """Send, or receive, all bytes of all views; a call takes as much as it can."""
    first, waiting = 0, list(views)
    while first < len(waiting):
        n_bytes = call(waiting[first : first + _MOST_PARTS])
        while first < len(waiting) and n_bytes >= len(waiting[first]):
            n_bytes -= len(waiting[first])
            first += 1
        if n_bytes:
            waiting[first] = waiting[first][n_bytes:]


def _sent(connection: socket.socket, meeting: Meeting, stalls: Stalls) -> _Call:
    """Send from views as much as there is room for, once there is; BlockingIOError when that takes too long."""
    room = select.poll()
    room.register(connection, select.POLLOUT)

    def call(views: Sequence[memoryview]) -> int:
        with suppress(BlockingIOError):
            return connection.sendmsg(views, (), socket.MSG_DONTWAIT)
        with stalls.watched():
            if not room.poll(1e3 * meeting.stall_timeout_s):
                raise BlockingIOError("there is no room")
        return 0

    return call


def _received(connection: socket.socket) -> _Call:
    """Receive into views until they are full, silence lasts too long or the other end is gone."""

    def call(views: Sequence[memoryview]) -> int:
        n_bytes = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not n_bytes:
            raise ConnectionResetError("the other end is gone")
        return n_bytes

    return call


def _greeting(name: str) -> bytes:
    return len(name).to_bytes(4) + name.encode()


def _accepted(listener: socket.socket, name: str, deadline: float) -> socket.socket:
    """The first connection whose greeting has the link's name; others are refused."""
    while True:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if _greets(connection, name):
            return connection
        connection.close()


def _greets(connection: socket.socket, name: str) -> bool:
    expected = _greeting(name)
    found = bytearray(len(expected))
    with suppress(OSError):  # it went away, or says nothing
        _exchange(_received(connection), [memoryview(found)])
    return found == expected
