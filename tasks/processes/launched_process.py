"""A launched process that ends with all its descendants on request, or when the process that launched it has ended."""

import asyncio
import fcntl
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from rollmill.tasks.errors import ConfigError, ServiceError
from rollmill.tasks.processes import supervisor

# Seconds between SIGTERM and SIGKILL: enough to flush logs, and short enough for a cancelled run to end soon.
STOP_GRACE_S = 5.0

_TAIL_BYTES = 1 << 16
# Seconds in which the kernel ends killed processes; one that waits for a device cannot be killed.
_KILL_MARGIN_S = 30.0
_PORTS_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Well-known services use ports below the first.
_FIRST_PORT, _MAX_PORTS = 12_000, 100


class LaunchedProcess:
    """A running command under a separate supervisor process; it ends when this object is garbage-collected.

    Attributes:
        name: name of the command in errors.
        log: file to which its output, both streams, is appended; None: the streams of this process.
        pid: process id of the supervisor, which is the id of the command's session and process group too.
    """

    def __init__(
        self, name: str, log: Path | None, popen: subprocess.Popen[bytes], log_start: int, grace_s: float
    ) -> None:
        self.name, self.log, self.pid = name, log, popen.pid
        self._popen, self._log_start, self._grace_s = popen, log_start, grace_s

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        pass_fds: Sequence[int] = (),
    ) -> "LaunchedProcess":
        """Start a command that neither Ctrl-C nor a closed terminal reaches.

        Args:
            name: name of the command in errors.
            command: the program and its arguments.
            log: file for its output; created with its folder, or appended to; None: the streams of this process.
            env: its whole environment; None: that of this process.
            cwd: its working directory; None: that of this process.
            stop_grace_s: seconds between asking the command to end and killing all its processes that still run.
            pass_fds: file descriptors that it inherits under the same numbers.
        """
        owner = [str(os.getpid()), str(stop_grace_s), ",".join(map(str, pass_fds))]
        output: BinaryIO | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("ab")
        with output or nullcontext():
            log_start = output.tell() if output else 0
            # Isolated and without site-packages: the supervisor starts within milliseconds, whatever is installed. Its
            # standard input is the lifeline, whose end the kernel closes when this process ends, even by SIGKILL.
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, *owner, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env=env,
                cwd=cwd,
                bufsize=0,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        return cls(name, log, popen, log_start, stop_grace_s)

    @property
    def is_running(self) -> bool:
        """True until the command and all its descendants have ended."""
        return self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the command; None while it runs; 128 + n: signal n ended it; 127: it could not be run."""
        return self._popen.poll()

    async def wait(self) -> int:
        """Wait for the end of the command and of its descendants; returns its exit status."""
        if self._popen.poll() is None:
            await _wait_for_exit(self.pid)
        return self._popen.wait()

    def begin_stop(self) -> None:
        """Ask the command to end, and do not wait for its end."""
        lifeline = self._popen.stdin
        if lifeline is None or lifeline.closed:
            return
        with suppress(BrokenPipeError):
            # It has ended without being stopped.
            lifeline.write(b".")
        lifeline.close()

    async def stop(self) -> None:
        """Ask the command to end, and return when the command and its descendants have ended.

        Raises:
            ServiceError: the kernel did not end it in time (a process that waits for a device, say).
        """
        self.begin_stop()
        try:
            async with asyncio.timeout(self._grace_s + _KILL_MARGIN_S):
                await self.wait()
        except TimeoutError:
            raise self._stuck() from None

    def stop_now(self) -> None:
        """Stop the command as `stop` does, but block; for code outside of an event loop."""
        self.begin_stop()
        try:
            self._popen.wait(self._grace_s + _KILL_MARGIN_S)
        except subprocess.TimeoutExpired:
            raise self._stuck() from None

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the command's log; empty without a log file."""
        if self.log is None:
            return ""
        with self.log.open("rb") as output:
            end = output.seek(0, os.SEEK_END)
            output.seek(max(self._log_start, end - _TAIL_BYTES))
            text = output.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _stuck(self) -> ServiceError:
        return ServiceError(self.name, f"process {self.pid} did not end", self.log_tail())


def split_command(field: str, command: str) -> list[str]:
    """Return the words of a command line; ConfigError, which names the setting `field`, if its program is not found."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(field, command, f"cannot be split into words as a shell does: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(field, command, "its program is not found; give a path or a name on PATH")
    return words


def free_port() -> int:
    """Return a free loopback port, if possible outside the range from which the kernel assigns ports.

    No other call returns it, in any process of this user, while this process runs.

    Raises:
        ServiceError: all ports that were tried are taken.
    """
    # A server may take a minute until it listens. A port that the kernel assigns would be taken by another process.
    try:
        first_given = int(_PORTS_GIVEN.read_text().split()[0])
    except OSError:
        # The kernel of a sandbox may not show it.
        first_given = 0
    ports = range(_FIRST_PORT, first_given)
    # At last 0, any that the kernel assigns.
    for port in (*random.SystemRandom().sample(ports, min(_MAX_PORTS, len(ports))), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                # Somebody listens on it.
                continue
            chosen: int = probe.getsockname()[1]
            if _reserve_port(chosen):
                return chosen
    raise ServiceError("port", "all that were tried are taken")


def _reserve_port(port: int) -> bool:
    """Return True if no process of this user has reserved a port; it is then reserved until this process ends."""
    folder = Path(tempfile.gettempdir(), f"rollmill-ports-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / str(port), os.O_CREAT | os.O_RDONLY, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    # Left open: the kernel releases the lock of a process that ends, killed included.
    return True


async def _wait_for_exit(pid: int) -> None:
    """Wait until a child process has ended; returns at once if its exit status was read before."""
    # A pidfd needs neither polling nor a thread that waits.
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
