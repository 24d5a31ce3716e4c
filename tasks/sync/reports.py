"""How a server's workers tell its API server that they are done: a line of JSON from each, on a local socket.

Imports nothing but the standard library's. The socket's name is in Linux's abstract namespace, so no file stays behind.
"""

import asyncio
import json
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from tasks.errors import SyncError

_LONGEST_BYTES = 1 << 26
"""Of a report: all tensors' checksums are some hundred bytes each."""


@dataclass(frozen=True)
class Report:
    """What one worker says when it has all, or has failed.

    Attributes:
        bytes, received_s, checksums, differing, spans: see WeightAnswer.
        error: why it failed; empty when it has all.
    """

    bytes: int = 0
    received_s: float = 0.0
    checksums: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    error: str = ""
    spans: tuple[tuple[Any, ...], ...] = ()


class Reports:
    """Where the workers of this server report; an async context manager.

    Attributes:
        address: name of the socket, as `ReportLine` wants it.

    Args:
        n_workers: how many report.
    """

    def __init__(self, n_workers: int) -> None:
        self.address = f"rollmill-{uuid.uuid4().hex}"
        self._n_workers = n_workers
        # One report of each worker: nobody else knows the address.
        self._found: asyncio.Queue[Report] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(
            self._read, path=f"\0{self.address}", limit=_LONGEST_BYTES
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()

    async def all(self) -> list[Report]:
        """The report of every worker, in the order in which they came.

        Raises:
            SyncError: one failed, or ended without a report; the others are not waited for.
        """
        found: list[Report] = []
        while len(found) < self._n_workers:
            report = await self._found.get()
            if report.error:
                raise SyncError(report.error)
            found.append(report)
        return found

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.close()
        if line:
            self._found.put_nowait(Report(**json.loads(line)))
        else:
            self._found.put_nowait(Report(error="a worker of the server ended without a report"))


class ReportLine:
    """A worker's end: connected at once, used once.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{address}")

    def send(self, report: Report) -> None:
        """Report, and hang up; nobody need listen any more."""
        with self._socket:
            try:
                self._socket.sendall(json.dumps(asdict(report)).encode() + b"\n")
            except OSError:
                return  # the order was given up: its answer is of no use
