"""Connection to a Ray cluster: one that exists, or one started here, which ends with the flow, killed included."""

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rollmill.flows.configuration.executor_config import ExecutorConfig
from rollmill.tasks.config import check_extra
from rollmill.tasks.errors import ConfigError, ServiceStartError
from rollmill.tasks.processes.launched_process import LaunchedProcess
from rollmill.tasks.processes.python_child import python_command

_POLL_S = 0.05
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Actors need no GPU, and what they see of them stays as it is.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@asynccontextmanager
async def connect_cluster(config: ExecutorConfig, logs: Path, timeout_s: float) -> AsyncIterator[Any]:
    """Connect this process to the configured Ray cluster, started here without an address; gives the module `ray`.

    Args:
        config: address of the cluster, and number of actors.
        logs: folder for the log of a cluster that is started here.
        timeout_s: seconds until it must answer.

    Raises:
        ConfigError: there is no cluster at the address.
        ServiceStartError: no cluster could be started here; with its last log lines.
    """
    check_extra("executor.kind", config.kind, "ray", "ray")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if config.address:
        async with _connected(config.address, timeout_s) as ray:
            yield ray
        return
    # Other users of this machine cannot use the cluster without the token. Ray reads it once in a process: later clusters have the same.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # A short path: those of sockets have some hundred characters at most.
    folder = Path(tempfile.mkdtemp(prefix="rollmill-ray-"))
    cpus = max(config.actors, os.cpu_count() or 1)
    command = python_command(
        "rollmill.flows.run.executor.ray_head", str(folder / "address"), str(cpus), str(folder)
    )
    head = LaunchedProcess.start("Ray", command, log=logs / "ray.log", stop_grace_s=1.0)
    try:
        address = await _read_address(head, folder / "address", timeout_s)
        async with _connected(address, timeout_s, head) as ray:
            yield ray
    finally:
        await head.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _read_address(head: LaunchedProcess, file: Path, timeout_s: float) -> str:
    """Return the address of the cluster that a head starts, once it is in a file."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (address := await asyncio.to_thread(_read_text, file)):
                if not head.is_running:
                    raise ServiceStartError("Ray", f"it ended with status {head.returncode}", head.log_tail())
                await asyncio.sleep(_POLL_S)
            return address
    except TimeoutError:
        raise ServiceStartError(
            "Ray", f"it did not start within {timeout_s:g} s (start_timeout_s)", head.log_tail()
        ) from None


def _read_text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@asynccontextmanager
async def _connected(
    address: str, timeout_s: float, head: LaunchedProcess | None = None
) -> AsyncIterator[Any]:
    # Half a second to import, which only runs with this executor need.
    import ray

    # What it logs of lost actors is reported by the flow, in one line.
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    init = partial(
        ray.init,
        address=address,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.CRITICAL,
    )
    try:
        # In a thread: it takes seconds, and in the main thread it would replace the flow's signal handlers.
        await asyncio.wait_for(asyncio.to_thread(init), timeout_s)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        if head:
            reason = f"it does not answer at {address} ({type(error).__name__}: {error})"
            raise ServiceStartError("Ray", reason, head.log_tail()) from None
        remedy = f"Ray does not answer there ({type(error).__name__}: {error}); give the host:port of a cluster's head"
        raise ConfigError("executor.address", address, remedy) from None
    try:
        yield ray
    finally:
        await asyncio.to_thread(ray.shutdown)
