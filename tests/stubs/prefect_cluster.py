"""A scaled Prefect server as deploy/kubernetes has it: Postgres, Redis, two API servers, background services.

All of them are real, listen on free loopback ports, and end with the process that started them.
"""

import os
import pwd
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from rollmill.flows.prefect_integration import local_server
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port

SETTINGS = Path(__file__).parents[2] / "deploy" / "kubernetes"
LONGEST_START_S = 300.0
STOP_GRACE_S = 10.0
USER = "postgres"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A scaled server that runs.

    Attributes:
        api_urls: address of the API of each API server.
        auth: `user:password` that each asks for.
        processes: what runs, by name.
    """

    api_urls: tuple[str, ...]
    auth: str
    processes: Mapping[str, LaunchedProcess]

    @property
    def client(self) -> dict[str, str]:
        """Settings of a client of the first API server."""
        return {"PREFECT_API_URL": self.api_urls[0], "PREFECT_API_AUTH_STRING": self.auth}


def settings_of(file: Path) -> dict[str, str]:
    """What an env file says, as compose and kustomize read it: NAME=VALUE lines, and comments."""
    lines = (line.strip() for line in file.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@contextmanager
def prefect_cluster(folder: Path, n_servers: int = 2) -> Iterator[Cluster]:
    """Start a cluster with an empty database; logs and homes are in `folder`."""
    with ExitStack() as stack:
        environment = stack.enter_context(_stores(folder))
        prefect = [sys.executable, "-m", "prefect", "server"]
        migration = subprocess.run(
            [*prefect, "database", "upgrade", "--yes"], env=environment, capture_output=True, text=True
        )
        assert migration.returncode == 0, migration.stdout + migration.stderr
        ports = [free_port() for _ in range(n_servers)]
        commands: dict[str, tuple[str, ...]] = {
            f"API server {n}": ("start", "--no-services", "--host", "127.0.0.1", "--port", str(port))
            for n, port in enumerate(ports)
        }
        commands["background services"] = ("services", "start")
        processes = {}
        for (name, words), port in zip_longest(commands.items(), ports):
            processes[name] = stack.enter_context(_launched(name, [*prefect, *words], folder, environment))
            # Two that fill one empty database with block types meet: the second ends, and a cluster's restart policy
            # starts it again. Nothing does here, so each waits for the one before.
            if port:
                _wait_until(processes[name], partial(_answers, port))
        yield Cluster(
            tuple(f"http://127.0.0.1:{port}/api" for port in ports),
            environment["PREFECT_SERVER_API_AUTH_STRING"],
            processes,
        )


@contextmanager
def _stores(folder: Path) -> Iterator[dict[str, str]]:
    """Postgres and Redis; gives the environment of Prefect's processes."""
    password = secrets.token_hex(8)
    with ExitStack() as stack:
        postgres = stack.enter_context(_postgres(folder, password))
        redis = stack.enter_context(_redis(folder, password))
        kept = {
            name: value for name, value in os.environ.items() if name not in local_server.CLIENT_VARIABLES
        }
        yield (
            kept
            | settings_of(SETTINGS / "prefect-server.env")
            | {
                "PREFECT_HOME": str(folder),
                "PREFECT_SERVER_DATABASE_HOST": "127.0.0.1",
                "PREFECT_SERVER_DATABASE_PORT": str(postgres),
                "PREFECT_SERVER_DATABASE_PASSWORD": password,
                "PREFECT_REDIS_MESSAGING_HOST": "127.0.0.1",
                "PREFECT_REDIS_MESSAGING_PORT": str(redis),
                "PREFECT_REDIS_MESSAGING_PASSWORD": password,
                "PREFECT_SERVER_DOCKET_URL": f"redis://:{password}@127.0.0.1:{redis}/0",
                "PREFECT_SERVER_API_AUTH_STRING": f"prefect:{password}",
            }
        )


@contextmanager
def _postgres(folder: Path, password: str) -> Iterator[int]:
    """An empty database `prefect` of a user `prefect`; gives the port."""
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: int(each.parent.name))
    as_user = _as_user()
    with TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as home:
        secret, data, port = Path(home) / "password", Path(home) / "data", free_port()
        secret.write_text(password)
        if as_user:
            for each in (Path(home), secret):
                shutil.chown(each, USER)
        initdb = [
            str(programs / "initdb"),
            "--pgdata",
            str(data),
            "--username",
            "prefect",
            "--encoding",
            "UTF8",
        ]
        initdb += ["--auth", "scram-sha-256", "--pwfile", str(secret), "--no-sync"]
        subprocess.run([*as_user, *initdb], cwd="/", check=True, capture_output=True)
        command = [
            str(programs / "postgres"),
            "-D",
            str(data),
            "-k",
            home,
            "-p",
            str(port),
            "-h",
            "127.0.0.1",
        ]
        with _launched("Postgres", [*as_user, *command], folder, os.environ, cwd=Path("/")) as process:
            client = {"PGPASSWORD": password, "PGHOST": "127.0.0.1", "PGPORT": str(port), "PGUSER": "prefect"}
            create = [str(programs / "createdb"), "prefect"]
            _wait_until(process, lambda: _succeeds(create, os.environ | client))
            yield port


def _as_user() -> list[str]:
    """What starts a command as Debian's user of Postgres, which refuses to run as root."""
    if os.geteuid():
        return []
    user = pwd.getpwnam(USER)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


@contextmanager
def _redis(folder: Path, password: str) -> Iterator[int]:
    """A broker with the settings of the file; gives the port."""
    port = free_port()
    command = ["redis-server", str(SETTINGS / "redis.conf"), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--dir", str(folder), "--requirepass", password]
    with _launched("Redis", command, folder, os.environ) as process:
        ping = ["redis-cli", "-p", str(port), "ping"]
        _wait_until(process, lambda: _succeeds(ping, os.environ | {"REDISCLI_AUTH": password}))
        yield port


@contextmanager
def _launched(
    name: str, command: list[str], folder: Path, environment: Mapping[str, str], cwd: Path | None = None
) -> Iterator[LaunchedProcess]:
    log = folder / f"{name.replace(' ', '-')}.log"
    process = LaunchedProcess.start(
        name, command, log=log, env=environment, cwd=cwd or folder, stop_grace_s=STOP_GRACE_S
    )
    try:
        yield process
    finally:
        process.stop_now()


def _wait_until(process: LaunchedProcess, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_START_S
    while not is_so():
        assert process.is_running, f"{process.name} ended: {process.log_tail()}"
        assert time.monotonic() < deadline, f"{process.name} does not answer: {process.log_tail()}"
        time.sleep(0.1)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/api/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _succeeds(command: list[str], environment: Mapping[str, str]) -> bool:
    return subprocess.run(command, env=environment, cwd="/", capture_output=True).returncode == 0
