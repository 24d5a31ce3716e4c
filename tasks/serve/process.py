"""A process that the flow launched: it ends, with all below it, when asked or when its owner is gone."""

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from tasks.errors import ServiceError
from tasks.serve import supervisor

_TAIL_BYTES = 1 << 16
_KILL_MARGIN_S = 30.0
_PORTS_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _MOST_PORTS = 12_000, 100
"""Those below are the homes of well-known services."""


class LaunchedProcess:
    """A command under a supervisor of its own; keep a reference, for it ends when this is collected.

    Attributes:
        name: what errors call it.
        log: file that its output, both streams, is appended to; None: our own streams.
        pid: the supervisor's, which is the command's session and process group too.
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
        stop_grace_s: float,
    ) -> "LaunchedProcess":
        """Start a command that neither Ctrl-C nor a closed terminal reaches.

        Args:
            name: what errors call it.
            command: the program and its arguments.
            log: file for its output; made with its folder, appended to; None: our own streams.
            env: its whole environment, as with subprocess; None: ours.
            cwd: its working directory; None: ours.
            stop_grace_s: seconds between asking it to end and killing all that is left.
        """
        owner = [str(os.getpid()), str(stop_grace_s)]
        with _opened(log) as output:
            log_start = output.tell() if output else 0
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, *owner, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                bufsize=0,
                start_new_session=True,
            )
        return cls(name, log, popen, log_start, stop_grace_s)

    @property
    def is_running(self) -> bool:
        """True until the command and everything below it are gone."""
        return self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status, None while running; 128 + n: signal n ended the command; 127: it could not be run."""
        return self._popen.poll()

    async def ended(self) -> int:
        """Wait for the end of the command and all below it, and return its exit status."""
        if self._popen.poll() is None:
            await _exit_of(self.pid)
        return self._popen.wait()

    async def stop(self) -> None:
        """Ask it to end, and return when it is gone with all below it; nothing happens when it already is.

        Raises:
            ServiceError: the kernel did not end it in time (a process that waits for a device, say).
        """
        self._ask()
        try:
            async with asyncio.timeout(self._grace_s + _KILL_MARGIN_S):
                await self.ended()
        except TimeoutError:
            raise self._stuck() from None

    def stop_now(self) -> None:
        """The same as `stop`, blocking: for `finally` blocks outside an event loop."""
        self._ask()
        try:
            self._popen.wait(self._grace_s + _KILL_MARGIN_S)
        except subprocess.TimeoutExpired:
            raise self._stuck() from None

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this process wrote; nothing when they went to our own streams."""
        if self.log is None:
            return ""
        with self.log.open("rb") as output:
            end = output.seek(0, os.SEEK_END)
            output.seek(max(self._log_start, end - _TAIL_BYTES))
            text = output.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _ask(self) -> None:
        lifeline = self._popen.stdin
        if lifeline is None or lifeline.closed:
            return
        with suppress(BrokenPipeError):  # it has ended by itself
            lifeline.write(b".")
        lifeline.close()

    def _stuck(self) -> ServiceError:
        return ServiceError(self.name, f"process {self.pid} did not end", self.log_tail())


def _opened(log: Path | None) -> AbstractContextManager[BinaryIO | None]:
    if log is None:
        return nullcontext()
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def free_port() -> int:
    """A loopback port that nobody listens on now, if it can be of those that the kernel gives to nobody.

    Who is told of it may take a minute to listen. Meanwhile others open connections and listen anywhere: one of the
    ports that they are given is soon taken.
    """
    for port in _private_ports():
        with socket.socket() as probe, suppress(OSError):  # somebody listens on it
            probe.bind(("127.0.0.1", port))
            chosen: int = probe.getsockname()[1]
            return chosen
    raise ServiceError("port", "all that were tried are taken")


def _private_ports() -> list[int]:
    """Some ports below those that the kernel gives to who asks for any, in no order; at last 0, for any."""
    try:
        first_given = int(_PORTS_GIVEN.read_text().split()[0])
    except OSError:  # a sandbox's kernel may not say
        first_given = 0
    ports = range(_FIRST_PORT, first_given)
    return [*random.SystemRandom().sample(ports, min(_MOST_PORTS, len(ports))), 0]


async def _exit_of(pid: int) -> None:
    """Wait, without polling, until a child of ours has ended; returns at once when it has been collected."""
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
