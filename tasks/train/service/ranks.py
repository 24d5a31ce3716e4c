"""The ranks of a trainer: how they find each other, receive commands, show that they live, and gather results.

Commands and heartbeats are keys of a store, never collectives. A rank that waits for a command sits in a store request with
a deadline, for hours if need be: a collective would time out, and would spin on some backends.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import msgspec
import torch
import torch.distributed as dist

from rollmill.tasks.errors import RollmillError, SyncError, TrainError, error_text
from rollmill.tasks.processes.gpus import VISIBLE, list_visible_gpus
from rollmill.tasks.processes.machine import STORE_FD_ENV, listen_at
from rollmill.tasks.sync.links.link import join_store, serve_store_at
from rollmill.tasks.train.engine.private_torch import PrefixStore, Store
from rollmill.tasks.train.rank_messages import gather_messages
from rollmill.tasks.train.service.commands import AnyCommand, Command

# A few late heartbeats are no death.
_BEATS_PER_TIMEOUT = 6
_DEAD_RANK_STATUS = 70


class CommandChannel:
    """Passes commands from rank 0 to the other ranks in order, and reports to these how each ended on rank 0.

    Rank 0 calls `publish` and `report_outcome`, the others `next` and `was_refused`.
    """

    def __init__(self, store: Store, wait_s: float) -> None:
        self._store, self._wait = store, timedelta(seconds=wait_s)
        self._number = 0

    def publish(self, command: Command[Any], taken_ns: int = 0) -> None:
        """Send a command to the other ranks, with the time in nanoseconds since 1970 at which rank 0 took it."""
        # Bytes, which the stubs of torch do not list.
        data: Any = msgspec.msgpack.encode((taken_ns, command))
        self._store.set(f"command/{self._number}", data)
        self._number += 1

    def next(self) -> tuple[Command[Any], int]:
        """Wait without limit for the next command; returns it and when rank 0 took it, in nanoseconds since 1970.

        Raises:
            DistNetworkError: the store, and so the service, has ended.
        """
        key = f"command/{self._number}"
        while True:
            # A wait without a limit would not notice that the store has ended.
            with contextlib.suppress(dist.DistStoreError):
                self._store.wait([key], self._wait)
                break
        self._number += 1
        taken_ns, command = msgspec.msgpack.decode(self._store.get(key), type=tuple[int, AnyCommand])
        return command, taken_ns

    def report_outcome(self, *, refused: bool) -> None:
        """Report to the other ranks whether the last command was refused on rank 0, by an error that ends no rank."""
        self._store.set(self._outcome_key, "refused" if refused else "done")

    def was_refused(self) -> bool:
        """Return True if rank 0 reports that it refused the last command; False if it does not report in time."""
        try:
            self._store.wait([self._outcome_key], self._wait)
        except dist.DistStoreError:
            return False
        return self._store.get(self._outcome_key) == b"refused"

    @property
    def _outcome_key(self) -> str:
        return f"outcome/{self._number - 1}"


class Heartbeats:
    """Lets every rank increment a key in a store; rank 0 watches the keys and ends the service if one stops."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._beats = [b""] * world_size
        self._heard_at = [time.monotonic()] * world_size
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()

    @property
    def silences_s(self) -> list[float]:
        """[W] seconds since rank 0 last saw a heartbeat of each rank."""
        now = time.monotonic()
        return [now - heard_at for heard_at in self._heard_at]

    def stop(self) -> None:
        """End the heartbeats of this rank, and its watch over the others."""
        self._stopped.set()
        # A thread that is in a request to the store while Python ends aborts the process.
        self._thread.join(self._timeout_s)

    def _beat(self) -> None:
        number = 0
        while not self._stopped.wait(self._timeout_s / _BEATS_PER_TIMEOUT if number else 0.0):
            number += 1
            self._store.set(f"beat/{self._rank}", str(number))
            if self._rank == 0:
                self._listen()

    def _listen(self) -> None:
        for rank, beat in enumerate(self._beats):
            key = f"beat/{rank}"
            current = self._store.get(key) if self._store.check([key]) else b""
            if current != beat:
                self._beats[rank], self._heard_at[rank] = current, time.monotonic()
            elif self.silences_s[rank] > self._timeout_s:
                sys.stderr.write(f"trainer: rank {rank} has been silent for {self.silences_s[rank]:.0f} s\n")
                sys.stderr.flush()
                # The main thread may be in a collective with the dead rank: only the end of the process gets it out,
                # after which the launcher ends the other ranks, whatever they wait for.
                os._exit(_DEAD_RANK_STATUS)


T = TypeVar("T")


class Outcome(msgspec.Struct, Generic[T]):
    """How `work` of `gather_results` ended on a rank, as a message.

    Attributes:
        results: its result alone; empty if it failed.
        error: text of its error.
    """

    results: list[T]
    error: str = ""


def gather_results(work: Callable[[], T], kind: type[T]) -> list[T]:
    """Run `work`, which returns a `kind`, on every rank; returns the [W] results on rank 0, nothing on the others.

    A collective, also if `work` fails on a rank.

    Raises:
        SyncError: `work` raised a RollmillError on some rank; raised on rank 0 alone.
    """
    # A rank that raised before the gathering would leave the others in it.
    try:
        own = Outcome([work()])
    except RollmillError as error:
        own = Outcome([], error_text(error))
    every = gather_messages(own, Outcome[kind])  # type: ignore[valid-type]  # a type that is known when it is called
    for number, each in enumerate(every):
        if not each.results:
            raise SyncError(f"rank {number}: {each.error}")
    return [result for each in every for result in each.results]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank, device and store of this process.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: number of ranks, W.
        device: where this rank computes.
        store: key-value store shared by all ranks, for messages outside collectives.
    """

    rank: int
    world_size: int
    device: torch.device
    store: Store

    def own_connection(self) -> Store:
        """Open another connection to the store, for a thread that blocks on it."""
        clone: Store = self.store.clone()  # type: ignore[attr-defined]  # torch has it, its stubs do not
        return clone


def join_ranks(timeout_s: float) -> Ranks:
    """Open torch's default process group, which DeepSpeed uses too, and return this process's rank, device and store.

    Args:
        timeout_s: seconds that one collective may wait for the slowest rank.

    Raises:
        TrainError: there is a GPU, and torch cannot use it.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # Messages and counts of chunks are exchanged in CPU memory, gradients on the device.
        backend = "cpu:gloo,cuda:nccl"
    elif gpus := list_visible_gpus():
        raise TrainError(
            f"torch {torch.__version__} cannot use the GPUs {','.join(gpus)}: install its CUDA build (make clean setup), whose CUDA 13 "
            f"needs NVIDIA's driver 580 or newer; or compute on the CPU with {VISIBLE}= in the environment"
        )
    else:
        device, backend = torch.device("cpu"), "gloo"
    timeout = timedelta(seconds=timeout_s)
    # One store serves the process group, commands and heartbeats.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port, opened = (
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        os.environ.get(STORE_FD_ENV),
    )
    if rank == 0:
        listener = socket.socket(fileno=int(opened)) if opened else listen_at(host, port)
        store = serve_store_at(listener, timeout_s)
    else:
        store = join_store(host, port, timeout_s)
    dist.init_process_group(
        backend,
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return Ranks(rank, world_size, device, PrefixStore("rollmill", store))


def describe_device(device: torch.device) -> str:
    """Return a device with the name of its GPU. Example: "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def is_first_on_machine() -> bool:
    """Return True on exactly one rank of each machine, the one with LOCAL_RANK 0."""
    return int(os.environ["LOCAL_RANK"]) == 0
