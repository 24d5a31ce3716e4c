"""How the ranks of a trainer hear of commands and of each other: keys of a store, never a collective.

A rank that waits for a command sits in a store request with a deadline, for hours if need be: a collective
would time out, and would spin on some backends.
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tasks.train.protocol import COMMANDS, Command

_BEATS_PER_TIMEOUT = 6
_DEAD_RANK_STATUS = 70


class CommandChannel:
    """Commands from rank 0 to the others, in order, and how they went on rank 0.

    `publish` and `tell` are rank 0's, `next` and `was_refused` the others'.
    """

    def __init__(self, store: Store, wait_s: float) -> None:
        self._store, self._wait = store, timedelta(seconds=wait_s)
        self._number = 0

    def publish(self, command: Command, taken_ns: int = 0) -> None:
        """Tell the other ranks, and when this one took the command, in nanoseconds since 1970."""
        self._store.set(self._key, f"{command.name} {taken_ns} {command.model_dump_json()}")
        self._number += 1

    def next(self) -> tuple[Command, int]:
        """Wait for the next command, however long that takes; with it comes when rank 0 took it.

        Raises:
            DistNetworkError: the store is gone, and with it the service.
        """
        while True:
            try:
                self._store.wait([self._key], self._wait)
            except dist.DistStoreError:
                continue  # nothing came within one wait
            name, taken_ns, body = self._store.get(self._key).decode().split(" ", 2)
            self._number += 1
            return COMMANDS[name].model_validate_json(body), int(taken_ns)

    def tell(self, *, refused: bool) -> None:
        """Say how the last command went here: True when it failed with an error that the service goes on after."""
        self._store.set(self._outcome_key, "refused" if refused else "done")

    def was_refused(self) -> bool:
        """Whether rank 0 has said so of the last command; False too when it says nothing, waiting for this rank perhaps."""
        try:
            self._store.wait([self._outcome_key], self._wait)
        except dist.DistStoreError:
            return False
        return self._store.get(self._outcome_key) == b"refused"

    @property
    def _outcome_key(self) -> str:
        return f"outcome/{self._number - 1}"

    @property
    def _key(self) -> str:
        return f"command/{self._number}"


class Heartbeats:
    """Each rank counts up a key of its own; rank 0 watches all of them, and ends the service when one stops."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._beats = [b""] * world_size
        self._heard_at = [time.monotonic()] * world_size
        threading.Thread(target=self._beat, name="heartbeats", daemon=True).start()

    @property
    def silences_s(self) -> list[float]:
        """[W] seconds since rank 0 heard of each rank."""
        now = time.monotonic()
        return [now - heard_at for heard_at in self._heard_at]

    def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            self._store.set(f"beat/{self._rank}", str(number))
            if self._rank == 0:
                self._listen()
            time.sleep(self._timeout_s / _BEATS_PER_TIMEOUT)

    def _listen(self) -> None:
        for rank, beat in enumerate(self._beats):
            key = f"beat/{rank}"
            current = self._store.get(key) if self._store.check([key]) else b""
            if current != beat:
                self._beats[rank], self._heard_at[rank] = current, time.monotonic()
            elif self.silences_s[rank] > self._timeout_s:
                sys.stderr.write(f"trainer: rank {rank} has been silent for {self.silences_s[rank]:.0f} s\n")
                sys.stderr.flush()
                os._exit(_DEAD_RANK_STATUS)  # torchrun ends the other ranks, whatever they wait for
