"""Worker processes of user code, as the process sees them that started them: start, ask, stop.

Environments, scorers and sinks share this class, the messages and the main loops. They differ in which worker receives a request and
when a worker is replaced, because an environment's worker has many open episodes, and a scorer's worker one call.
"""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Self

from rollmill.tasks.errors import (
    ForeignError,
    WorkerDiedError,
    WorkerError,
    WorkerKilledError,
    WorkerTimeoutError,
    mask_credentials,
)
from rollmill.tasks.processes.launched_process import LaunchedProcess
from rollmill.tasks.processes.python_child import child_environment
from rollmill.tasks.processes.supervisor import SIGNALLED
from rollmill.tasks.user_code.worker_main import HEADER, MessageKind, make_frame

USER_VARIABLES = re.compile(
    r"""PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG|LANGUAGE|LC_.*|TMPDIR|XDG_.*|LD_.*
    |PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|ROLLMILL_(SCRATCH|USER_PATH)|HF_.*|TRANSFORMERS_.*|TOKENIZERS_PARALLELISM|NLTK_DATA
    |(CUDA|NVIDIA|ROCR|HIP|TORCH|PYTORCH|OMP|MKL|OPENBLAS|NUMEXPR|POLARS|RAYON)_.*
    |SSL_CERT_.*|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|.*_PROXY|.*_proxy""",
    re.VERBOSE,
)
"""Environment variables that workers of environments and scorers have, unless a name is a secret's or a value has a password.

Of ROLLMILL_* only these: a setting such as `score.judge.api_key_env` may name any other for a key, which only the flow needs.
"""
_SECRET_NAME = re.compile(
    "(^|_)((API)?KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|CREDENTIALS?|AUTH)(_|$)"
)
EXIT_GRACE_S = 1.0
"""Seconds between the end of a connection and that of its process, before it is stopped."""


def select_user_variables(further: Sequence[str], base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of `base` for a worker that runs an environment or a scorer, which may run what a model wrote.

    These are USER_VARIABLES, and those that `further` names, secrets included; a name that ends with * is the beginning of names.
    """

    def is_user_variable(name: str, value: str) -> bool:
        if not USER_VARIABLES.fullmatch(name) or _SECRET_NAME.search(name):
            return False
        # An address of a proxy may have no scheme.
        is_hidden = name.lower().endswith("_proxy") and "@" in value
        return not is_hidden and mask_credentials(value) == value

    return {
        name: value
        for name, value in base.items()
        if is_user_variable(name, value) or any(fnmatchcase(name, each) for each in further)
    }


class WorkerProcess:
    """A process that handles requests; it and all processes that it started end with the process that started it.

    Attributes:
        name: name of the worker in errors.
        ended: future of the reason why the worker has ended. Example: "ended with exit status 3".
    """

    def __init__(
        self,
        name: str,
        process: LaunchedProcess,
        connection: socket.socket,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        settings: bytes,
    ) -> None:
        self.name, self._process, self._connection, (reader, self._writer) = (
            name,
            process,
            connection,
            streams,
        )
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count()
        self._stop_reason = ""
        self._is_writable, self._was_killed = True, False
        self._reading = asyncio.create_task(self._read(reader))
        self._created = self.send(settings)

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        settings: bytes,
        *,
        log: Path | None,
        stop_grace_s: float,
        variables: Mapping[str, str] = os.environ,
    ) -> Self:
        """Start a worker without waiting until it has created its handler.

        Args:
            name: name of the worker in errors.
            command: command line of the worker; the file descriptor of its socket is appended.
            settings: body of the first request, from which the worker creates its handler.
            log: file for its output; None: this process's standard error.
            stop_grace_s: seconds between SIGTERM and SIGKILL.
            variables: its environment variables; those that Python needs to find modules are added.

        Raises:
            WorkerError: no process can be started.
        """
        ours, theirs = socket.socketpair()
        try:
            process = LaunchedProcess.start(
                name,
                [*command, str(theirs.fileno())],
                log=log,
                # Unbuffered: what a worker printed before it was killed must be in its log.
                env=child_environment(variables) | {"PYTHONUNBUFFERED": "1"},
                stop_grace_s=stop_grace_s,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            ours.close()
            raise WorkerError(f"{name} cannot be started: {error}") from error
        finally:
            theirs.close()
        return cls(name, process, ours, await asyncio.open_connection(sock=ours), settings)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the worker has created its handler.

        Raises:
            WorkerError: the handler could not be created, or not within `timeout_s` seconds.
        """
        await self.receive(self._created, timeout_s)

    def send(self, body: bytes, kind: MessageKind = MessageKind.REQUEST) -> asyncio.Future[bytes]:
        """Send a request; returns the future of its answer. Cancelling the future cancels the request."""
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        if self.ended.done():
            self._fail_pending()
        else:
            self._write(make_frame(number, kind, body))
        answer.add_done_callback(lambda answer: self._forget(number, answer))
        return answer

    async def receive(self, answer: asyncio.Future[bytes], timeout_s: float) -> bytes:
        """Wait for the answer to a request.

        Raises:
            WorkerTimeoutError: there is no answer within `timeout_s` seconds.
            WorkerDiedError: the worker process ended; the text says how. A WorkerKilledError: something else killed it.
            ForeignError: the handler in the worker raised an error.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise WorkerTimeoutError(f"{self.name}: no answer within {timeout_s:g} s") from None

    @property
    def is_dead(self) -> bool:
        """True if an idle worker has ended, even if the event loop has not been notified yet."""
        try:
            return self.ended.done() or not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            # The connection is open.
            return False
        except OSError:
            return True

    @property
    def returncode(self) -> int | None:
        """Exit status of the worker, None while it runs; 128 + n if signal n ended it, 127 if it could not be run."""
        return self._process.returncode

    def log_tail(self) -> str:
        """Return the last lines of the worker's log."""
        return self._process.log_tail()

    def begin_stop(self) -> None:
        """Begin to end the worker process and all its descendants, without waiting."""
        self._process.begin_stop()

    async def stop(self, reason: str = "") -> None:
        """End the worker process and all its descendants; open requests fail with `reason`, by default its exit status.

        A worker that has unread requests may handle them within its `stop_grace_s`, unless it ends at SIGTERM.

        Raises:
            ServiceError: the process did not end in time.
        """
        self._stop_reason = self._stop_reason or reason
        if self._is_writable:
            self._is_writable = False
            self._writer.write_eof()
        await self._process.stop()
        await asyncio.wait([self._reading])

    def _forget(self, number: int, answer: asyncio.Future[bytes]) -> None:
        self._pending.pop(number, None)
        if answer.cancelled():
            self._write(make_frame(number, MessageKind.CANCEL))

    def _write(self, frame: bytes) -> None:
        if self._is_writable:
            self._writer.write(frame)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Receive answers until the worker has ended."""
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    length, number, kind = HEADER.unpack(await reader.readexactly(HEADER.size))
                    body = await reader.readexactly(length)
                    answer = self._pending.get(number)
                    if answer is None or answer.done():
                        # It was cancelled meanwhile.
                        continue
                    if kind == MessageKind.ANSWER:
                        answer.set_result(body)
                    else:
                        error_type, _, text = body.decode().partition("\n")
                        answer.set_exception(ForeignError(error_type, text))
            # A process that exits closes its connection first: stopped at once, it would report SIGTERM as its end.
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_GRACE_S):
                    await self._process.wait()
            await self._process.stop()
        finally:
            self._is_writable = False
            self._writer.close()
            # Known now: whoever notices the end may give a reason to stop what has ended.
            self._was_killed = not self._stop_reason and self.returncode == SIGNALLED + signal.SIGKILL
            self.ended.set_result(
                self._stop_reason or f"ended with {_describe_status(self._process.returncode)}"
            )
            self._fail_pending()

    def _fail_pending(self) -> None:
        kind = WorkerKilledError if self._was_killed else WorkerDiedError
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(kind(f"{self.name} {self.ended.result()}"))
                # Asyncio logs exceptions that are never retrieved, and not every answer is awaited.
                answer.exception()


def _describe_status(status: int | None) -> str:
    """Describe an exit status in words: 139 is "signal SIGSEGV", 163 "signal 35", 3 "exit status 3"."""
    number = (status or 0) - SIGNALLED
    if not 0 < number < signal.NSIG:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        # Real-time signals have no names.
        return f"signal {number}"
