"""The flow's end of one worker process."""

import asyncio
import os
import signal
import socket
import sys
from asyncio import IncompleteReadError, StreamReader, StreamWriter, subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from tasks.errors import ScoreError, ScoreWorkerError
from tasks.score.worker import LENGTH_BYTES, framed

STDERR = 2
EXIT_GRACE_S = 1.0
"""Between the end of a connection and that of its process, before it is killed."""


class WorkerProcess:
    """A process of `tasks.score.worker`, the leader of a process group that is killed with it."""

    def __init__(self, process: subprocess.Process, reader: StreamReader, writer: StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._is_ready = False

    @classmethod
    async def start(cls, paths: Sequence[str], settings: bytes) -> Self:
        """Start it without waiting until its scorers are imported; it finds modules where this process does.

        Its scorers are at `paths`, and those with `from_config` are made from `settings`, a ScoreConfig as JSON.

        It must be called in a thread that lives as long as the worker is to: the kernel ends it with that.

        Raises:
            ScoreError: no process can be started.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await subprocess.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "tasks.score.worker", str(os.getpid()), str(theirs.fileno()), *paths),
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(each or str(Path.cwd()) for each in sys.path)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ScoreError(f"cannot start a score worker: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(framed(settings))
        return cls(process, reader, writer)

    async def ready(self, timeout_s: float) -> None:
        """Wait until its scorers are imported.

        Raises:
            ScoreError: they cannot be, or not within `timeout_s` seconds.
        """
        if self._is_ready:
            return
        try:
            async with asyncio.timeout(timeout_s):
                error = await self.receive()
        except TimeoutError:
            raise ScoreError(f"a score worker was not ready within {timeout_s:g} s") from None
        if error:
            raise ScoreError(f"a score worker cannot import its scorers: {error.decode()}")
        self._is_ready = True

    async def send(self, content: bytes) -> None:
        """Send it one message; when it is gone, `receive` says so."""
        with suppress(ConnectionError):
            self._writer.write(framed(content))
            await self._writer.drain()

    async def receive(self) -> bytes:
        """Its next message.

        Raises:
            ScoreWorkerError: it ended before; says how.
        """
        try:
            length = await self._reader.readexactly(LENGTH_BYTES)
            return await self._reader.readexactly(int.from_bytes(length, "big"))
        except (IncompleteReadError, ConnectionError):
            raise ScoreWorkerError(f"the worker process ended with {await self._end()}") from None

    async def _end(self) -> str:
        """How it ended, in words; its connection is closed, so it is about to."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_GRACE_S):
                await self.gone()
        self.kill()
        status = await self.gone()
        return f"exit status {status}" if status >= 0 else f"signal {_signal_name(-status)}"

    @property
    def has_ended(self) -> bool:
        """True when it is gone, between two calls for example; the kernel knows it before the loop is told."""
        if self._process.returncode is not None:
            return True
        with suppress(ChildProcessError):  # the loop is about to be told
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, how) is not None
        return True

    def kill(self) -> None:
        """End it and what its scorer started, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()

    async def gone(self) -> int:
        """Wait until it has ended; its exit status, negative the signal that ended it."""
        return await self._process.wait()


def _signal_name(number: int) -> str:
    """Its name; its number when it has none. Examples: 11 is SIGSEGV, the real-time signal 35 is 35."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
