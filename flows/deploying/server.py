"""The local Prefect server: one for a home folder, in the background, in a session of its own.

It outlives the command that started it, and Ctrl-C does not reach it. Its database, log and state file lie in
its home. `down` ends it; a state file whose process is gone, or is another by now, does no harm.
"""

import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from tasks.errors import ConfigError, ServiceError, ServiceStartError
from tasks.serve.supervisor import descendants

HOME = Path(".rollmill/prefect")
HOST = "127.0.0.1"
PORT = 4200
START_TIMEOUT_S = 300.0
STOP_GRACE_S = 20.0
ANSWER_TIMEOUT_S = 10.0
LOOK_AGAIN_S = 0.1

SETTINGS = {
    "PREFECT_SERVER_UI_API_URL": "/api",  # else the UI calls port 4200, whatever the server's port is
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "2",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P2D",  # the database grows by 20 kB a task run
    "PREFECT_CLI_PROMPT": "false",
}
"""What the server runs with; a variable of the same name in our environment wins."""

NOT_THE_SERVERS = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH")
"""Settings of clients, which would lead the server to another one."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that was started.

    Attributes:
        pid: its process, which leads a session and a process group of its own.
        started: the kernel's start time of that process, which no later process of that pid has.
        port: loopback port it listens on.
    """

    pid: int
    started: int
    port: int

    @property
    def ui_url(self) -> str:
        """Where a browser finds it."""
        return f"http://{HOST}:{self.port}"

    @property
    def api_url(self) -> str:
        """What PREFECT_API_URL is to be."""
        return f"{self.ui_url}/api"

    @property
    def is_running(self) -> bool:
        """True while that very process lives."""
        return self.started > 0 and _start_time(self.pid) == self.started


def up(home: Path = HOME, port: int = PORT, *, start_timeout_s: float = START_TIMEOUT_S) -> str:
    """Start the server unless it runs, and return the address of its UI.

    Raises:
        ConfigError: another process listens on the port.
        ServiceStartError: the server did not answer in time, or ended.
    """
    return _start(home, port, start_timeout_s).ui_url


def ensure(home: Path = HOME, port: int = PORT, *, start_timeout_s: float = START_TIMEOUT_S) -> str:
    """The API address to use: that of PREFECT_API_URL when it is set, else the local server's, started if needed.

    Raises:
        ConfigError: no Prefect server answers at PREFECT_API_URL; or as for `up`.
        ServiceStartError: as for `up`.
    """
    attached = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    if not attached:
        return _start(home, port, start_timeout_s).api_url
    problem = _problem(attached)
    if problem:
        remedy = f"{problem}; start that server, correct the address, or unset it to use a local server"
        raise ConfigError("PREFECT_API_URL", attached, remedy)
    return attached


def status(home: Path = HOME) -> Server | None:
    """The server of this home, if its process runs."""
    try:
        server = Server(**json.loads(_state_file(home).read_text()))
    except (OSError, ValueError, TypeError):
        return None  # never started, stopped, or cut off while writing: all of them mean that none runs
    return server if server.is_running else None


def down(home: Path = HOME, *, grace_s: float = STOP_GRACE_S) -> bool:
    """End the server and all that it started; False when none ran.

    Raises:
        ServiceError: the kernel did not end it in time.
    """
    if not home.is_dir():
        return False
    with _locked(home):
        server = status(home)
        if server:
            _end(server.pid, grace_s)
        _state_file(home).unlink(missing_ok=True)
        return server is not None


def _start(home: Path, port: int, timeout_s: float) -> Server:
    home = home.absolute()
    with _locked(home):
        server = status(home)
        if server is None:
            server = _launch(home, port)
        _wait_until_healthy(server, home, timeout_s)
        return server


def _launch(home: Path, port: int) -> Server:
    _check_free(port)
    with _log_file(home).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)],
            env=environment(home, os.environ),
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process.pid, _start_time(process.pid), port)
    _state_file(home).write_text(json.dumps(asdict(server)))
    return server


def environment(home: Path, ours: Mapping[str, str]) -> dict[str, str]:
    """The server's environment, made from ours."""
    kept = {name: value for name, value in ours.items() if name not in NOT_THE_SERVERS}
    return SETTINGS | kept | {"PREFECT_HOME": str(home)}


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            remedy = (
                f"the Prefect server cannot listen there ({error}): end what does, take another port with "
                f"`rollmill up --port {port + 1}`, or set PREFECT_API_URL to a Prefect server that runs"
            )
            raise ConfigError("port", port, remedy) from error


def _wait_until_healthy(server: Server, home: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while problem := _problem(server.api_url):
        if not server.is_running:
            raise _failed(server, home, "it ended while starting")
        if time.monotonic() > deadline:
            _end(server.pid, STOP_GRACE_S)
            raise _failed(server, home, f"not healthy after {timeout_s:g} s: {problem}")
        time.sleep(LOOK_AGAIN_S)
    if not server.is_running:
        raise _failed(server, home, f"it ended while another Prefect server answered on port {server.port}")


def _failed(server: Server, home: Path, reason: str) -> ServiceStartError:
    _state_file(home).unlink(missing_ok=True)
    lines = _log_file(home).read_text(errors="replace").splitlines()
    return ServiceStartError(f"Prefect server {server.ui_url}", reason, "\n".join(lines[-20:]))


def _problem(api_url: str) -> str:
    """Why no Prefect server can be used at this address; empty when one can."""
    key, basic = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING", "")
    user, _, password = basic.partition(":")
    try:
        answer = httpx.get(
            f"{api_url}/health",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            auth=(user, password) if basic else None,
            trust_env=not api_url.startswith(f"http://{HOST}:"),  # a proxy does not find our loopback
            timeout=ANSWER_TIMEOUT_S,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"nothing answers there ({error or type(error).__name__})"
    if answer.status_code in (401, 403):
        return "it wants other credentials than PREFECT_API_KEY or PREFECT_API_AUTH_STRING give"
    if answer.status_code != 200 or "json" not in answer.headers.get("content-type", ""):
        return (
            f"what answers there is not Prefect's API (it ends with /api; /health gave {answer.status_code})"
        )
    return ""


def _end(pid: int, grace_s: float) -> None:
    """SIGTERM, then SIGKILL to the process and what descends from it, and wait until they are gone."""
    tree = [pid, *descendants(pid)]
    waits = [(signal.SIGTERM, tree[:1], grace_s), (signal.SIGKILL, tree, STOP_GRACE_S)]
    for number, asked, patience_s in waits:
        with suppress(ProcessLookupError):
            for each in asked:
                os.kill(each, number)
        if _gone(tree, patience_s):
            return
    raise ServiceError("Prefect server", f"process {pid} did not end")


def _gone(pids: list[int], timeout_s: float) -> bool:
    """Wait for the end of processes that need not be our children; False when one is still there."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            is_gone = bool(selector.select(max(0.0, deadline - time.monotonic())))
        os.close(descriptor)
        if not is_gone:
            return False
    return True


def _start_time(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 when it is gone, ended and not yet collected included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def _state_file(home: Path) -> Path:
    return home / "server.json"


def _log_file(home: Path) -> Path:
    return home / "server.log"


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One command at a time starts or stops the server of a home."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / "server.lock").open("w")
    except OSError as error:
        remedy = f"{error.strerror}; run in a folder that you may write to"
        raise ConfigError("home of the Prefect server", str(home), remedy) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
