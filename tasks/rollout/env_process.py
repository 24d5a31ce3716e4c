"""One worker process of an environment, from its start to its end, as the flow sees it."""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from tasks.errors import (
    EnvironmentDiedError,
    EpisodeError,
    EpisodeTimeoutError,
    RequestError,
    ServiceStartError,
    TransientRequestError,
)
from tasks.rollout.config import RolloutConfig
from tasks.rollout.env_messages import Description
from tasks.serve.connection import Connection
from tasks.serve.process import LaunchedProcess

Answer = TypeVar("Answer")

PINGS_PER_TIMEOUT = 4
START_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Launch:
    """How workers are started.

    Attributes:
        config: settings of the rollouts; what environment, and how long it may take.
        settings: file with `config`, for the worker.
        logs: folder for their logs.
        stop_grace_s: seconds between asking a worker to end and killing it.
    """

    config: RolloutConfig
    settings: Path
    logs: Path
    stop_grace_s: float


class EnvWorker:
    """A worker process that is up.

    Attributes:
        name: what errors call it.
        n_open: episodes that are open in it, and problems that it is asked for.
        n_taken: episodes that were ever opened in it.
        n_ended: of them, those whose end it has answered.
        is_full: set when it has taken `rollout.env_worker_max_episodes`.
        is_empty: set while nobody asks it.
    """

    def __init__(
        self, name: str, launch: Launch, process: LaunchedProcess, socket: Path, changed: asyncio.Event
    ) -> None:
        self.name, self._config, self._process, self._socket = name, launch.config, process, socket
        self._connection = Connection(
            "http://worker",
            api_key="",
            connect_timeout_s=launch.config.env_timeout_s,
            unix_socket=str(socket),
        )
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.n_open = self.n_taken = self.n_ended = 0
        self._doubted, self._changed = asyncio.Event(), changed
        self.is_full, self.is_empty = asyncio.Event(), asyncio.Event()
        self.is_empty.set()

    @classmethod
    async def start(cls, number: int, launch: Launch, changed: asyncio.Event) -> tuple[Self, Description]:
        """Launch a worker and wait until its environment is made; returns what the environment is.

        Args:
            number: of the worker, for its name.
            launch: how workers are started.
            changed: set whenever `is_open` may have become True.

        Raises:
            ServiceStartError: it ended, or did not answer in time; with its last log lines.
        """
        name = f"worker {number} of environment {launch.config.environment}"
        socket = Path(tempfile.mkdtemp(prefix="rollmill-")) / "worker"
        process = LaunchedProcess.start(
            name,
            [sys.executable, "-m", "tasks.rollout.env_worker", str(launch.settings), str(socket)],
            log=launch.logs / f"environment-{number}.log",
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stop_grace_s=launch.stop_grace_s,
        )
        worker = cls(name, launch, process, socket, changed)
        try:
            return worker, await worker._described()
        except BaseException:
            await worker.stop("did not start")
            raise

    async def _described(self) -> Description:
        timeout_s = self._config.env_start_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                wait_s = max(START_PAUSE_S, deadline - time.monotonic())
                body = await self._connection.send("GET", "/environment", b"", wait_s)
                return msgspec.json.decode(body, type=Description)
            except RequestError as error:
                reason = f"not up within rollout.env_start_timeout_s = {timeout_s:g} s ({error})"
                if not self._process.is_running:
                    reason = f"ended with status {self._process.returncode} while starting"
                elif time.monotonic() < deadline and isinstance(error, TransientRequestError):
                    await asyncio.sleep(START_PAUSE_S)
                    continue
                raise ServiceStartError(self.name, reason, self._process.log_tail()) from error

    async def ask(self, path: str, question: object, answer: type[Answer]) -> Answer:
        """Post a question.

        Raises:
            EpisodeTimeoutError: no answer within `rollout.env_timeout_s`.
            EnvironmentDiedError: the worker ended, or was ended, before it answered.
            EpisodeError: it cannot read the question, or its answer is of another shape.
        """
        timeout_s = self._config.env_timeout_s
        try:
            body = await self._connection.send("POST", path, msgspec.json.encode(question), timeout_s)
        except RequestError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._doubted.set()
                text = f"{self.name}: no answer within rollout.env_timeout_s = {timeout_s:g} s"
                raise EpisodeTimeoutError(text) from error
            if error.__cause__ is None:  # it answers, by a status
                raise EpisodeError(f"{self.name}: {error}") from error
            await asyncio.wait([self._end], timeout=timeout_s)
            reason = self._end.result() if self._end.done() else str(error)
            raise EnvironmentDiedError(f"{self.name} {reason}") from error
        try:
            return msgspec.json.decode(body, type=answer)
        except msgspec.DecodeError as error:
            raise EpisodeError(
                f"{self.name}: what the environment gave for {path} is wrong: {error}"
            ) from error

    async def failed(self) -> str:
        """Wait until it ends by itself or answers no ping; returns which, in words."""
        ended = asyncio.ensure_future(self._process.ended())
        timeout_s = self._config.env_timeout_s
        try:
            while not ended.done():
                try:
                    await self._connection.send("GET", "/ping", b"", timeout_s)
                    self._doubted.clear()
                    self._changed.set()
                except RequestError as error:
                    if isinstance(error.__cause__, TimeoutError):
                        return f"answered no ping within rollout.env_timeout_s = {timeout_s:g} s"
                await self._until_next_ping(ended)
        finally:
            ended.cancel()
        return f"ended with status {self._process.returncode}"

    async def _until_next_ping(self, ended: asyncio.Future[int]) -> None:
        """Wait some time, or until it is doubted or ends."""
        doubted = asyncio.ensure_future(self._doubted.wait())
        wait_s = self._config.env_timeout_s / PINGS_PER_TIMEOUT
        either: list[asyncio.Future[Any]] = [ended, doubted]
        await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        doubted.cancel()

    @property
    def is_open(self) -> bool:
        """True when it takes more episodes: it has not had its number, and no answer of it is overdue."""
        return not self.is_full.is_set() and not self._doubted.is_set()

    def log_tail(self) -> str:
        """Its last log lines."""
        return self._process.log_tail()

    def opened(self, n_episodes: int) -> None:
        """Note that somebody begins to ask it, for an episode (1) or a problem (0)."""
        self.n_open += 1
        self.n_taken += n_episodes
        self.is_empty.clear()
        if 0 < self._config.env_worker_max_episodes <= self.n_taken:
            self.is_full.set()

    def closed(self, n_ended: int) -> None:
        """Note that somebody asks it no more; `n_ended` is 1 when that was the end of an episode by its own word."""
        self.n_open -= 1
        self.n_ended += n_ended
        if not self.n_open:
            self.is_empty.set()

    async def stop(self, reason: str) -> None:
        """End it; the episodes that are open in it fail with `reason`."""
        if not self._end.done():
            self._end.set_result(reason)
        await self._process.stop()
        await self._connection.close()
        shutil.rmtree(self._socket.parent, ignore_errors=True)  # a worker that was not killed has removed it
