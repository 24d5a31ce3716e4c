"""One gloo link between the trainer's sender and one worker of a server; no global process group is touched."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

SENDER, RECEIVER = 0, 1
LOOPBACK = "127.0.0.1"


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


def open_link(store: Store, prefix: str, rank: int, host: str, timeout_s: float) -> ProcessGroupGloo:
    """Join the other end under `prefix`; returns when both are there, RuntimeError after `timeout_s` seconds."""
    timeout = timedelta(seconds=timeout_s)
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    with all_cores():
        options._devices = [
            ProcessGroupGloo.create_device(hostname=LOOPBACK)
            if host == LOOPBACK
            else ProcessGroupGloo.create_default_device()
        ]
        return ProcessGroupGloo(PrefixStore(prefix, store), rank, 2, options)


def link_name(prefix: str, rank: int, worker: int) -> str:
    """Under which name a trainer's rank and a server's worker meet in the store."""
    return f"{prefix}/{rank}/{worker}"


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
