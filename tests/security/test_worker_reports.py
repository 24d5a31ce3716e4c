"""Only processes of the server's user can report for its workers; another text than a report is an error."""

import asyncio
import os
import sys

import pytest

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.vllm_plugin.worker_reports import ReportSender, WorkerReport, WorkerReports

FORGE = r"""
import os, socket, sys
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect("\0" + sys.argv[1])
try:
    connection.sendall(b'{"error": "forged"}\n')
    refused = connection.recv(1) == b""
except ConnectionError:  # closed before the line was sent, or with the line unread
    refused = True
assert refused
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
async def test_report_of_another_user_is_not_heard() -> None:
    async with WorkerReports(1) as reports:
        command = sys.executable, "-c", FORGE, reports.address
        other = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, error = await other.communicate()
        assert other.returncode == 0, error.decode()
        ReportSender(reports.address).send(WorkerReport(bytes=7))
        assert [each.bytes for each in await reports.all()] == [7]


@pytest.mark.parametrize("line", [b"no JSON\n", b'{"bytes": "many"}\n', b"\xff\n", b"[]\n"])
async def test_other_text_than_a_report_is_a_sync_error(line: bytes) -> None:
    async with WorkerReports(1) as reports:
        _, writer = await asyncio.open_unix_connection(f"\0{reports.address}")
        writer.write(line)
        with pytest.raises(SyncError, match="cannot be read"):
            async with asyncio.timeout(60.0):
                await reports.all()
        writer.close()


async def test_line_without_end_is_a_sync_error() -> None:
    async with WorkerReports(1) as reports:
        _, writer = await asyncio.open_unix_connection(f"\0{reports.address}")
        writer.write(b'{"error": "cut')
        writer.close()
        with pytest.raises(SyncError, match="cannot be read"):
            async with asyncio.timeout(60.0):
                await reports.all()
