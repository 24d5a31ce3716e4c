"""A server of S3 for benchmarks: moto's, on a free port of this machine."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from rollmill.tasks.processes.launched_process import free_port


@contextmanager
def s3_server() -> Iterator[None]:
    """Start moto's server on a free port; this process, and those it starts, send their requests there."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    nothing = subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=nothing, stderr=nothing, start_new_session=True)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        asyncio.run(_until_it_answers(os.environ["AWS_ENDPOINT_URL"]))
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


async def _until_it_answers(url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(url)
            except httpx.TransportError:
                await asyncio.sleep(0.05)
            else:
                return
