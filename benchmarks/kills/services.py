"""Services around a run in separate processes: a Prefect server, and an S3 store behind a gateway.

A service manager, here a thread, starts a dead one again after `RESTART_DELAY_S`.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from rollmill.flows.prefect_integration import local_server
from rollmill.tasks.errors import ServiceError
from rollmill.tasks.processes.launched_process import free_port

RESTART_DELAY_S = 1.0
"""Seconds between the end of a process and its restart, of every service manager of this benchmark."""
START_TIMEOUT_S, POLL_S = 60.0, 0.05
BUCKET = "failures"


class Services:
    """A Prefect server and an S3 store of one folder; dead ones are started again until `close`.

    Attributes:
        environment: variables that lead a run to both.
        root: `store.root` of runs in the store.
    """

    def __init__(self, folder: Path) -> None:
        self._home = folder / "prefect"
        self._prefect_port, self._s3_port, self._objects_port = free_port(), free_port(), free_port()
        self._objects = self._start_python("moto.server", "-H", "127.0.0.1", "-p", str(self._objects_port))
        _wait_for_answer(self._objects_port)
        self._gateway = self._start_gateway()
        _wait_for_answer(self._s3_port)
        local_server.up(self._home, self._prefect_port)
        self.root = f"s3://{BUCKET}/runs"
        self.environment = {
            "PREFECT_API_URL": f"http://127.0.0.1:{self._prefect_port}/api",
            "PREFECT_HOME": str(self._home),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._s3_port}",
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_DEFAULT_REGION": "us-east-1",
            "ROLLMILL_SCRATCH": str(folder / "scratch"),
        }
        self._is_closed = threading.Event()
        self._manager = threading.Thread(target=self._restart_dead, daemon=True)
        self._manager.start()

    def kill_prefect(self) -> None:
        """Kill the Prefect server.

        Raises:
            ServiceError: it does not run.
        """
        server = local_server.status(self._home)
        if server is None:
            raise ServiceError("Prefect server", "it does not run, so it cannot be killed")
        os.kill(server.pid, signal.SIGKILL)

    def kill_s3(self) -> None:
        """Kill the gateway of the S3 store; its objects remain."""
        self._gateway.kill()

    def close(self) -> None:
        """End both."""
        self._is_closed.set()
        self._manager.join()
        for process in (self._gateway, self._objects):
            process.kill()
            process.wait()
        local_server.down(self._home)

    def _restart_dead(self) -> None:
        while not self._is_closed.wait(POLL_S):
            if self._gateway.poll() is not None:
                time.sleep(RESTART_DELAY_S)
                self._gateway = self._start_gateway()
            if local_server.status(self._home) is None:
                time.sleep(RESTART_DELAY_S)
                local_server.up(self._home, self._prefect_port)

    def _start_gateway(self) -> "subprocess.Popen[bytes]":
        return self._start_python("benchmarks.kills.gateway", str(self._s3_port), str(self._objects_port))

    def _start_python(self, module: str, *arguments: str) -> "subprocess.Popen[bytes]":
        nothing = subprocess.DEVNULL
        return subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=nothing, stderr=nothing)


@contextmanager
def serve_run(folder: Path) -> Iterator[Services]:
    """Start the services, lead this process to them too, and end them after the block."""
    services = Services(folder)
    os.environ |= services.environment
    try:
        from rollmill.tasks.store.s3.s3_objects import s3_filesystem

        s3_filesystem().call_s3("create_bucket", Bucket=BUCKET)
        yield services
    finally:
        services.close()


def _wait_for_answer(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}", trust_env=False)
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
        else:
            return
