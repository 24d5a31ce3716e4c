"""A Prefect server of the benchmark's own, as `rollmill up` starts it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmill.flows.prefect_integration import local_server
from rollmill.flows.prefect_integration.prefect_api import QUIET_TERMINAL
from rollmill.tasks.processes.launched_process import free_port

LOGS_TIMEOUT_S = 10.0


@contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """Start a server, and lead Prefect to it; nothing that imports Prefect may have been imported before."""
    api = f"{local_server.up(home, free_port())}/api"
    os.environ |= QUIET_TERMINAL | {"PREFECT_API_URL": api, "PREFECT_HOME": str(home)}
    try:
        yield api
    finally:
        _send_logs()
        local_server.down(home)


def _send_logs() -> None:
    """Send what flow runs have logged, which Prefect would else try when the server is gone."""
    from prefect.logging.handlers import APILogWorker  # Prefect reads its settings when it is imported

    APILogWorker.drain_all(timeout=LOGS_TIMEOUT_S)
