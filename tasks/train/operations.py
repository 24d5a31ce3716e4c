"""Commands that were accepted: each an operation whose result can be asked for later."""

import queue
import secrets
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tasks.observe.spans import Span
from tasks.train.protocol import Command

_KEPT_RESULTS = 256


@dataclass(frozen=True, slots=True)
class Operation:
    """A command under way or done.

    Attributes:
        id: what its result is asked for by; the idempotency key that it was asked with, when there was one.
        command: what was asked.
        outcome: its result or error, once there is one.
        spans: what the ranks did for it, and since the command before; whole once there is an outcome.
    """

    id: str
    command: Command
    outcome: "Future[Any]" = field(default_factory=Future)
    spans: list[Span] = field(default_factory=list)


class Operations:
    """Accepts commands on the control API's thread, hands them out on rank 0's."""

    def __init__(self) -> None:
        # The flow, which alone has the token, awaits what it asks for: a command or two wait, whatever the batch's size.
        self._queue: queue.Queue[Operation] = queue.Queue()
        self._known: OrderedDict[str, Operation] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, command: Command, key: str = "") -> Operation:
        """Queue a command, unless `register` finds it."""
        operation, is_new = self.register(command, key)
        if is_new:
            self._queue.put(operation)
        return operation

    def register(self, command: Command, key: str = "") -> tuple[Operation, bool]:
        """The operation of a command, and whether it is a new one, which is not queued yet.

        It is a known one when the command was sent with this idempotency key before, or is under way and of those that are joined.
        """
        key = key or secrets.token_hex(8)
        with self._lock:
            if key in self._known:
                return self._known[key], False
            for known in self._known.values():
                if command.is_joined and known.command == command and not known.outcome.done():
                    self._known[key] = known
                    return known, False
            operation = self._known[key] = Operation(key, command)
            done = [key for key, each in self._known.items() if each.outcome.done()]
            for key in done[: max(0, len(self._known) - _KEPT_RESULTS)]:
                del self._known[key]
        return operation, True

    def find(self, operation_id: str) -> Operation | None:
        """An operation by its id; None when there is none, or when its result is too old."""
        return self._known.get(operation_id)

    def take(self) -> Operation:
        """Wait for the next command, however long that takes."""
        return self._queue.get()

    @property
    def busy(self) -> str:
        """Name of a command that is not done; empty when all are."""
        with self._lock:
            return next((each.command.name for each in self._known.values() if not each.outcome.done()), "")
