"""The local Prefect server: one for each home folder, in the background, in a separate session.

It outlives the command that started it, and Ctrl-C does not reach it. Its home holds its database, log and state file.
`down` ends it. A state file whose process has ended does no harm, even if the kernel has given its pid away again.
"""

# Why not `prefect server start --background` and `prefect server stop` (Prefect 3.8.8): the first pipes the server's
# output to a process that exits at once, so neither a log nor the reason of a failed start remains, and does not wait
# until the server is healthy. The second sends SIGTERM to whichever process has the pid of its file by then, does not
# wait for its end, and two commands at a time race for that file.

import fcntl
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
import typer

from rollmill.tasks.errors import ConfigError, ServiceError, ServiceStartError
from rollmill.tasks.processes.machine import process_start
from rollmill.tasks.processes.python_child import child_environment, python_command

HOME = Path(".rollmill/prefect")
HOST = "127.0.0.1"
# Where no port is chosen, the first free one of these is taken: each folder's server needs its own.
PORTS = range(4200, 4300)
START_TIMEOUT_S = 900.0
# After so long a start is announced: on a busy machine it takes minutes, and a command would look stuck.
QUIET_START_S = 10.0
STOP_GRACE_S = 20.0
ANSWER_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.1

# The server's settings; a variable of the same name in our environment overrides one.
SETTINGS = {
    # Without it the UI calls port 4200, whatever the server's port is.
    "PREFECT_SERVER_UI_API_URL": "/api",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "2",
    # The database grows by 20 kB a task run.
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P2D",
    "PREFECT_CLI_PROMPT": "false",
}

# Settings of clients: with them the server would connect to another server.
CLIENT_VARIABLES = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH")


@dataclass(frozen=True, slots=True)
class Server:
    """A local Prefect server that Rollmill has started.

    Attributes:
        pid: its process, the leader of a separate session and process group.
        started: the kernel's start time of that process, which distinguishes it from a later process with the same pid.
        port: loopback port that it listens on.
    """

    pid: int
    started: int
    port: int

    @property
    def ui_url(self) -> str:
        """Address of the server's UI."""
        return f"http://{HOST}:{self.port}"

    @property
    def api_url(self) -> str:
        """Address of the server's API, for PREFECT_API_URL."""
        return f"{self.ui_url}/api"

    @property
    def is_running(self) -> bool:
        """True while the server's process lives."""
        return self.started > 0 and process_start(self.pid) == str(self.started)


def up(home: Path = HOME, port: int | None = None, *, start_timeout_s: float = START_TIMEOUT_S) -> str:
    """Start the local Prefect server unless it runs; returns the address of its UI.

    Args:
        home: folder of the server's database, log and state.
        port: loopback port; None: the first free one of PORTS.
        start_timeout_s: seconds until the server must answer.

    Raises:
        ConfigError: another process listens on the port.
        ServiceStartError: the server did not answer in time, or ended.
    """
    return _start(home, port, start_timeout_s).ui_url


def ensure(home: Path = HOME, port: int | None = None, *, start_timeout_s: float = START_TIMEOUT_S) -> str:
    """Return the API address to use: PREFECT_API_URL if set, otherwise the local server's, which is started if needed.

    Raises:
        ConfigError: no Prefect server answers at PREFECT_API_URL; or as for `up`.
        ServiceStartError: as for `up`.
    """
    attached = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    if not attached:
        return _start(home, port, start_timeout_s).api_url
    problem = find_problem(attached)
    if problem:
        remedy = f"{problem}; start that server, correct the address, or unset it to use a local server"
        raise ConfigError("PREFECT_API_URL", attached, remedy)
    return attached


def status(home: Path = HOME) -> Server | None:
    """Return the local Prefect server of the folder `home`; None if its process does not run."""
    try:
        server = Server(**json.loads(_state_file(home).read_text()))
    except (OSError, ValueError, TypeError):
        # Never started, stopped, or interrupted while writing the file: no server runs in each case.
        return None
    return server if server.is_running else None


def down(home: Path = HOME, *, grace_s: float = STOP_GRACE_S) -> bool:
    """Stop the local Prefect server and all processes below it; False if none ran.

    Raises:
        ServiceError: the kernel did not end it in time.
    """
    if not home.is_dir():
        return False
    with _lock_home(home):
        server = status(home)
        if server:
            _end(server.pid, grace_s)
        _state_file(home).unlink(missing_ok=True)
        return server is not None


def _start(home: Path, port: int | None, timeout_s: float) -> Server:
    home = home.absolute()
    with _lock_home(home):
        server = status(home)
        if server is None:
            server = _launch(home, port)
        _wait_until_healthy(server, home, timeout_s)
        return server


def _launch(home: Path, port: int | None) -> Server:
    # The server inherits the socket, so that no other process can take the port in between.
    with listen(port) as listener, _log_file(home).open("wb") as log:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            python_command("rollmill.flows.prefect_integration.guarded_server", str(listener.fileno())),
            pass_fds=[listener.fileno()],
            env=child_environment(environment(home, os.environ)),
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process.pid, int(process_start(process.pid) or 0), port)
    _state_file(home).write_text(json.dumps(asdict(server)))
    return server


def environment(home: Path, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the local server's environment variables: SETTINGS, overridden by `ours` without those for clients, and its home."""
    kept = {name: value for name, value in ours.items() if name not in CLIENT_VARIABLES}
    return SETTINGS | kept | {"PREFECT_HOME": str(home)}


def listen(port: int | None) -> socket.socket:
    """Return a socket that listens on a loopback port; None: the first free one of PORTS.

    Raises:
        ConfigError: the port, or each of PORTS, is taken or cannot be used.
    """
    if port is None:
        for each in PORTS:
            with suppress(OSError):
                return socket.create_server((HOST, each))
        remedy = (
            "the Prefect server can listen on none of them: choose another with `rollmill up --port PORT`"
        )
        raise ConfigError("ports", f"{PORTS[0]} to {PORTS[-1]}", remedy)
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        remedy = (
            f"the Prefect server cannot listen there ({error}): leave out --port to take a free one; "
            f"to use a Prefect server that runs there, set PREFECT_API_URL=http://{HOST}:{port}/api"
        )
        raise ConfigError("port", port, remedy) from error


def _wait_until_healthy(server: Server, home: Path, timeout_s: float) -> None:
    started, is_announced = time.monotonic(), False
    while problem := find_problem(server.api_url) or _find_other_listener(server):
        if not server.is_running:
            raise _start_error(server, home, f"it ended while starting: {problem}")
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            _end(server.pid, STOP_GRACE_S)
            reason = (
                f"not healthy after {timeout_s:g} s: {problem}; end other work on this machine and try again"
            )
            raise _start_error(server, home, reason)
        if waited_s > QUIET_START_S and not is_announced:
            is_announced = True
            typer.echo(
                "starting the local Prefect server: usually some seconds, on a busy machine minutes", err=True
            )
        time.sleep(POLL_INTERVAL_S)


def _find_other_listener(server: Server) -> str:
    """Return that the port is another process's, such as the server of a folder that began at the same time; empty if it is ours."""
    with suppress(psutil.Error):
        process = psutil.Process(server.pid)
        for each in (process, *process.children(recursive=True)):
            if any(
                one.status == psutil.CONN_LISTEN and one.laddr.port == server.port
                for one in each.net_connections("tcp")
            ):
                return ""
    return f"another process listens on port {server.port}: run the command again"


def _start_error(server: Server, home: Path, reason: str) -> ServiceStartError:
    _state_file(home).unlink(missing_ok=True)
    lines = _log_file(home).read_text(errors="replace").splitlines()
    return ServiceStartError(f"Prefect server {server.ui_url}", reason, "\n".join(lines[-20:]))


def find_problem(api_url: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
    """Return why the Prefect server at this address cannot be used; empty if it can."""
    key, basic = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING", "")
    user, _, password = basic.partition(":")
    try:
        answer = httpx.get(
            f"{api_url}/health",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            auth=(user, password) if basic else None,
            # A proxy does not reach our loopback.
            trust_env=not api_url.startswith(f"http://{HOST}:"),
            timeout=timeout_s,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"nothing answers there ({error or type(error).__name__})"
    if answer.status_code in (401, 403):
        return "it refuses the credentials of PREFECT_API_KEY or PREFECT_API_AUTH_STRING"
    if answer.status_code != 200 or "json" not in answer.headers.get("content-type", ""):
        return f"the service there is not Prefect's API (its address ends with /api; /health gave {answer.status_code})"
    return ""


def _end(pid: int, grace_s: float) -> None:
    """Stop a process and its descendants: SIGTERM to the process, and after `grace_s` seconds SIGKILL to all that still run.

    Raises:
        ServiceError: they did not end in time after SIGKILL.
    """
    try:
        server = psutil.Process(pid)
        tree = [server, *server.children(recursive=True)]
        server.terminate()
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs(tree, grace_s)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    if psutil.wait_procs(left, STOP_GRACE_S)[1]:
        raise ServiceError("Prefect server", f"process {pid} did not end")


def _state_file(home: Path) -> Path:
    return home / "server.json"


def _log_file(home: Path) -> Path:
    return home / "server.log"


@contextmanager
def _lock_home(home: Path) -> Iterator[None]:
    """Hold the lock of a home folder in the block, so that one command at a time starts or stops its server."""
    try:
        # Its database has all runs' parameters, logs and artifacts.
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Also one that Prefect's own commands have made.
        home.chmod(0o700)
        lock = (home / "server.lock").open("w")
    except OSError as error:
        remedy = f"{error.strerror}; run in a folder that this user may write to"
        raise ConfigError("home of the Prefect server", str(home), remedy) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
