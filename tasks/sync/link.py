"""What carries one trainer rank's part of the weights to one worker of a server, and where both ends meet."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import Store, TCPStore

STALL_NS = 50_000_000
"""Silence on a link that is shorter (50 ms) is its speed, not a wait for the other end."""


class Stalls:
    """When the other end of a link took, or gave, nothing; used by one thread at a time."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The time inside is one, unless it is too short."""
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            if (ended := time.perf_counter_ns()) - started >= STALL_NS:
                self._found.append((started, ended))

    def take(self) -> list[tuple[int, int]]:
        """From when to when, moments of `time.perf_counter_ns`, in order; they are kept no longer."""
        found, self._found = self._found, []
        return found


class SendingLink(Protocol):
    """The trainer's end; one thread opens it and sends, any thread closes it.

    Attributes:
        stalls: filled as far as the transport can tell: of all of them while the link is opened, of tcp while it sends.
    """

    stalls: Stalls

    def open(self) -> None:
        """Wait for the other end; SyncError when it does not come in time."""

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Hand over one bucket, [n] uint8 each part; they are not read any more when it returns or raises.

        Raises:
            SyncError: nothing goes any more. The link is of no use then.
        """

    def close(self) -> None:
        """Drop the link; whoever waits in `open` or `send` gets a SyncError."""


class ReceivingLink(Protocol):
    """The server's end; one thread opens it, one at a time receives, any thread closes it.

    Attributes:
        stalls: filled as far as the transport can tell, as those of the other end.
    """

    stalls: Stalls

    def open(self) -> None:
        """Join the other end; SyncError when it is not there in time."""

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """Wait for one bucket, [n] uint8 each part; they are not written any more when it returns or raises.

        Raises:
            SyncError: it did not arrive whole, or not in time. The link is of no use then.
        """

    def close(self) -> None:
        """Drop the link; whoever waits in `receive` gets a SyncError."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """How two ends of a link find each other.

    Attributes:
        store: both ends'.
        name: of the link in the store.
        address: of this machine, where the other end can reach it.
        timeout_s: seconds that opening may take.
        stall_timeout_s: seconds in which something must go or come.
    """

    store: Store
    name: str
    address: str
    timeout_s: float
    stall_timeout_s: float


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """The store where both ends meet, at any free port of this machine's address `host` and no other address."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store that another process serves; RuntimeError when it is not there within `timeout_s` seconds."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def local_address(host: str, port: int, timeout_s: float) -> str:
    """This machine's address by which it reaches a store; OSError when it does not."""
    with socket.create_connection((host, port), timeout_s) as connection:
        address: str = connection.getsockname()[0]
        return address


def link_name(prefix: str, rank: int, worker: int, stream: int = 0) -> str:
    """Under which name a trainer's rank and a server's worker meet in the store, once for each stream."""
    return f"{prefix}/{rank}/{worker}/{stream}"


@contextmanager
def all_cores() -> Iterator[None]:
    """Let threads that start inside run on every core: vLLM's CPU worker pins itself to one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n] uint8 view of a contiguous tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8)


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n] uint8 of all parts one after another; the part itself when there is but one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def scatter(data: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy what `packed` gave into parts of the same sizes."""
    at = 0
    for part in parts:
        part.copy_(data[at : at + part.numel()])
        at += part.numel()
