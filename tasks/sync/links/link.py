"""Interface of a link, which carries weights from one trainer rank to one worker of a server, and how both ends meet."""

import hashlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import Store, TCPStore

from rollmill.tasks.processes.machine import listen_at

CPU = torch.device("cpu")

# 50 ms. A shorter silence is due to the link's speed and does not count as a wait for the other end.
STALL_NS = 50_000_000


class Stalls:
    """Records intervals in which a link waited for the process at its other end; used by one thread at a time."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int]] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record when the block began and ended, unless it took less than STALL_NS (50 ms)."""
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            if (ended := time.perf_counter_ns()) - started >= STALL_NS:
                self._found.append((started, ended))

    def take(self) -> list[tuple[int, int]]:
        """Remove and return the intervals, in order, as (start, end) of `time.perf_counter_ns`."""
        found, self._found = self._found, []
        return found


class SendingLink(Protocol):
    """The trainer's end of a link, which sends weights. One thread opens it and sends; any thread may close it.

    Attributes:
        stalls: records waits for the other end: while the link opens, and with tcp while it sends.
    """

    stalls: Stalls

    def open(self) -> None:
        """Wait until the receiver connects; raises SyncError if it does not in time."""

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send one bucket, given as parts of [n] uint8 each, which are not read after the call returns or raises.

        Raises:
            SyncError: the link is broken and cannot be used any more.
        """

    def close(self) -> None:
        """Close the link; a call of `open` or `send` in another thread raises SyncError."""


class ReceivingLink(Protocol):
    """The server's end of a link, which receives weights. One thread opens it, one at a time receives; any may close it.

    Attributes:
        stalls: records waits for the start of a bucket, with tcp and shm; empty with nccl.
    """

    stalls: Stalls

    def open(self) -> None:
        """Connect to the sender; raises SyncError if that does not succeed in time."""

    def receive(self, parts: Sequence[torch.Tensor]) -> None:
        """Receive one bucket into parts of [n] uint8 each, which are not written after the call returns or raises.

        Raises:
            SyncError: the bucket did not arrive whole and in time; the link cannot be used any more.
        """

    def close(self) -> None:
        """Close the link; a call of `receive` in another thread raises SyncError."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What an end of a link needs to find the other end: a store, a key in it, an address, time limits.

    Attributes:
        store: shared by both ends.
        name: key of the link in the store.
        address: of this machine, as the other end reaches it.
        timeout_s: seconds that opening may take.
        stall_timeout_s: seconds within which some byte must be sent or received.
        device: of this end's weights; NCCL connects GPUs.
        secret: which both ends know from their orders. It never goes through the store, which everybody in reach can read.
    """

    store: Store
    name: str
    address: str
    timeout_s: float
    stall_timeout_s: float
    device: torch.device = CPU
    secret: str = ""


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Start the store through which links are opened, at a free port of one address of this machine (`listen_at`)."""
    return serve_store_at(listen_at(host), timeout_s)


def serve_store_at(listener: socket.socket, timeout_s: float) -> TCPStore:
    """Start a store at a listening socket, which it takes over; its `host` is the socket's address."""
    # TCPStore itself would listen at all addresses of the machine, and it has no password.
    address, port, *_ = listener.getsockname()
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store of another process; RuntimeError if it does not answer within `timeout_s` seconds."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def local_address(host: str, port: int, timeout_s: float) -> str:
    """Find the address from which this machine reaches a store at `host`; raises OSError if it does not."""
    with socket.create_connection((host, port), timeout_s) as connection:
        address: str = connection.getsockname()[0]
        return address


def link_name(prefix: str, rank: int, worker: int, stream: int) -> str:
    """Return the key of a link in the rendezvous store, by which a trainer rank and a server's worker meet, one for each stream.

    The prefix is the links' secret, so the key has its digest.
    """
    return f"{_hash_prefix(prefix)}/{rank}/{worker}/{stream}"


def report_refusal(store: Store, prefix: str) -> None:
    """Record in the rendezvous store that a server will not open the links of a prefix; any process may, at any time."""
    store.append(_REFUSALS, f"{_hash_prefix(prefix)} ")


def find_refused(store: Store, prefixes: Iterable[str]) -> set[str]:
    """Return those prefixes whose links a server will not open, by `report_refusal`."""
    refused = store.get(_REFUSALS).decode().split() if store.check([_REFUSALS]) else []
    return {each for each in prefixes if _hash_prefix(each) in refused}


_REFUSALS = "refusals"


def _hash_prefix(prefix: str) -> str:
    return hashlib.sha256(prefix.encode()).hexdigest()


@contextmanager
def use_all_cores() -> Iterator[None]:
    """Let threads that start in the block run on every core."""
    # A thread inherits its starter's affinity, and vLLM's worker on CPU pins itself to one core.
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous tensor as [n] uint8."""
    return tensor.reshape(-1).view(torch.uint8)
