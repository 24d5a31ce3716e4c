"""Reports from a server's workers to its API server: one line of JSON from each, on a local socket.

The socket's name is in Linux's abstract namespace, so no file remains. Every user of the machine can connect to it, so a
report counts only if it comes from a process of this server's user.
"""

import asyncio
import os
import socket
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import msgspec

from rollmill.tasks.errors import SyncError
from rollmill.tasks.observe.spans import Span

# 64 MiB: the checksums of all tensors take some hundred bytes each, and asyncio's default limit of a line is 64 KiB.
_MAX_REPORT_BYTES = 1 << 26

# Linux's struct ucred, which the kernel fills in: pid, uid and gid of the process that has connected.
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class WorkerReport:
    """One worker's report that it has received all weights, has put them in place, or failed.

    Attributes:
        bytes, received_s, checksums, differing, uncompared, spans: see `WeightUpdateResponse`.
        is_compared: False while a loaded copy of the model is to be compared with the weights, between steps of the live one.
        error: why it failed; empty on success.
    """

    bytes: int = 0
    received_s: float = 0.0
    checksums: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    error: str = ""
    spans: tuple[Span, ...] = ()
    is_compared: bool = True


class WorkerReports:
    """Receives the reports of this server's workers; an async context manager.

    Args:
        n_workers: how many workers report.

    Attributes:
        address: name of the Unix socket to which `ReportSender` connects.
    """

    def __init__(self, n_workers: int) -> None:
        self.address = f"rollmill-{uuid.uuid4().hex}"
        self._n_workers = n_workers
        # Bounded by one report of each worker: only workers are heard.
        self._received: asyncio.Queue[WorkerReport] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(
            self._read, path=f"\0{self.address}", limit=_MAX_REPORT_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def all(self) -> list[WorkerReport]:
        """Wait for the report of every worker; returns them in the order of their arrival.

        Raises:
            SyncError: a worker failed, ended without a report or sent another text; the others are not awaited.
        """
        reports: list[WorkerReport] = []
        while len(reports) < self._n_workers:
            report = await self._received.get()
            if report.error:
                raise SyncError(report.error)
            reports.append(report)
        return reports

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _find_user(writer) != os.getuid():
            writer.close()
            return
        try:
            line = await reader.readline()
            # The socket of a worker that was killed ends without a line.
            report = WorkerReport(error="a worker of the server ended without a report")
            if line:
                report = msgspec.json.decode(line, type=WorkerReport)
        # ValueError: the line is longer than `_MAX_REPORT_BYTES`, or not UTF-8.
        except (OSError, ValueError, msgspec.DecodeError) as error:
            report = WorkerReport(error=f"a worker of the server sent a report that cannot be read: {error}")
        writer.close()
        self._received.put_nowait(report)


def _find_user(writer: asyncio.StreamWriter) -> int:
    """Return the id of the user whose process has connected."""
    # A second object of the same socket: uvloop's own has no `getsockopt`.
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid


class ReportSender:
    """A worker's connection for one report; it is opened at once, so that the worker's death is noticed.

    Raises:
        OSError: nobody listens at the address.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{address}")

    def send(self, report: WorkerReport) -> None:
        """Send the report and close the connection."""
        with self._socket:
            try:
                self._socket.sendall(msgspec.json.encode(report) + b"\n")
            # A cancelled update needs no report.
            except OSError:
                return
