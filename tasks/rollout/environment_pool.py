"""Worker processes of an environment: start, monitor, replace and stop them, and distribute episodes."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from rollmill.tasks.errors import (
    EpisodeError,
    EpisodeTimeoutError,
    ServiceDiedError,
    ServiceError,
    ServiceStartError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rollmill.tasks.observe.spans import span
from rollmill.tasks.processes.python_child import python_command
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment_messages import DescribeRequest, EnvironmentDescription
from rollmill.tasks.user_code.worker_main import MessageKind
from rollmill.tasks.user_code.worker_process import WorkerProcess, select_user_variables

Answer = TypeVar("Answer")

WORKER_COMMAND = tuple(python_command("rollmill.tasks.rollout.environment_worker"))
PINGS_PER_TIMEOUT = 4
START_TIMEOUT_S = 120.0
"""Seconds in which a new worker must have imported and made the environment; large libraries take half a minute."""
MAX_RESTARTS = 3
"""Workers in a row that may fail without finishing an episode: more are a fault of the environment, and the run stops."""


class EnvironmentWorker:
    """A running worker process, which plays episodes of an environment.

    Attributes:
        process: the worker process.
        n_open: number of open episodes and pending problem requests.
        n_taken: number of episodes ever opened.
        n_ended: number of episodes that the worker closed.
        reached_limit: set when it has opened `rollout.env_worker_max_episodes` episodes.
        is_empty: set while no episode is open and no problem request pending.
    """

    def __init__(self, process: WorkerProcess, config: RolloutConfig, changed: asyncio.Event) -> None:
        self.process, self._config, self._changed = process, config, changed
        self.n_open = self.n_taken = self.n_ended = 0
        self._is_overdue = asyncio.Event()
        self.reached_limit, self.is_empty = asyncio.Event(), asyncio.Event()
        self.is_empty.set()

    @classmethod
    async def start(
        cls, number: int, config: RolloutConfig, logs: Path, stop_grace_s: float, changed: asyncio.Event
    ) -> tuple[Self, EnvironmentDescription]:
        """Launch a worker and wait until its environment is created; returns the environment's description.

        `number` is part of the worker's name; `changed` is set whenever `is_open` may have become True.

        Raises:
            ServiceStartError: it ended, or did not answer in time; with its last log lines.
        """
        process = await WorkerProcess.start(
            f"worker {number} of environment {config.environment.name}",
            WORKER_COMMAND,
            config.model_dump_json().encode(),
            log=logs / f"environment-{number}.log",
            stop_grace_s=stop_grace_s,
            variables=select_user_variables(config.env_variables),
        )
        worker = cls(process, config, changed)
        try:
            await process.wait_until_ready(START_TIMEOUT_S)
            return worker, await worker.ask(DescribeRequest(), EnvironmentDescription)
        except (WorkerError, EpisodeError) as error:
            await process.stop("did not start")
            raise ServiceStartError(process.name, f"did not start: {error}", process.log_tail()) from error
        except BaseException:
            await process.stop("did not start")
            raise

    async def ask(self, request: msgspec.Struct, answer: type[Answer]) -> Answer:
        """Send a request and return the answer.

        Raises:
            EpisodeTimeoutError: no answer within `rollout.env_timeout_s`.
            WorkerDiedError: the worker ended, or was killed, before it answered.
            ForeignError: the environment raised.
            EpisodeError: the worker's answer is malformed.
        """
        timeout_s = self._config.env_timeout_s
        try:
            body = await self.process.receive(self.process.send(msgspec.json.encode(request)), timeout_s)
        except WorkerTimeoutError as error:
            self._is_overdue.set()
            text = f"{self.process.name}: no answer within rollout.env_timeout_s = {timeout_s:g} s"
            raise EpisodeTimeoutError(text) from error
        try:
            return msgspec.json.decode(body, type=answer)
        except msgspec.DecodeError as error:
            question = type(request).__name__
            raise EpisodeError(
                f"{self.process.name}: what the environment gave for {question} is wrong: {error}"
            ) from error

    async def wait_for_failure(self) -> str:
        """Wait until the worker ends unasked or stops answering pings; return a description of what happened."""
        ended, timeout_s = self.process.ended, self._config.env_timeout_s
        while not ended.done():
            try:
                await self.process.receive(self.process.send(b"", MessageKind.PING), timeout_s)
            except WorkerTimeoutError:
                return f"answered no ping within rollout.env_timeout_s = {timeout_s:g} s"
            except WorkerDiedError:
                break
            self._is_overdue.clear()
            self._changed.set()
            # The next ping is sent early if an answer is overdue: the worker may block.
            overdue = asyncio.ensure_future(self._is_overdue.wait())
            either: list[asyncio.Future[Any]] = [ended, overdue]
            wait_s = timeout_s / PINGS_PER_TIMEOUT
            try:
                await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                overdue.cancel()
        return ended.result()

    @property
    def is_open(self) -> bool:
        """True if the worker accepts more episodes: it has not ended, is not full, and no answer is overdue."""
        is_over = self.reached_limit.is_set() or self._is_overdue.is_set() or self.process.ended.done()
        return not is_over

    def begin_request(self, n_episodes: int) -> None:
        """Count the start of an episode (1) or of a problem request (0)."""
        self.n_open += 1
        self.n_taken += n_episodes
        self.is_empty.clear()
        if 0 < self._config.env_worker_max_episodes <= self.n_taken:
            self.reached_limit.set()

    def end_request(self, n_ended: int) -> None:
        """Count the end of a request; `n_ended` is 1 if the worker itself closed an episode."""
        self.n_open -= 1
        self.n_ended += n_ended
        if not self.n_open:
            self.is_empty.set()


class EnvironmentPool:
    """Runs environment workers; one that fails, or has opened its maximum of episodes, is replaced.

    Args:
        config: settings of rollouts: the environment, and its time limits.
        logs: folder of the workers' log files.
        stop_grace_s: seconds between SIGTERM and SIGKILL of a worker.

    Attributes:
        restarts: number of workers replaced because they failed.
    """

    def __init__(self, config: RolloutConfig, logs: Path, stop_grace_s: float) -> None:
        self._config, self._logs, self._stop_grace_s = config, logs, stop_grace_s
        self._alive: set[EnvironmentWorker] = set()
        self._up: dict[int, EnvironmentWorker] = {}
        self._changed = asyncio.Event()
        self._failure: ServiceError | None = None
        self.restarts = 0

    async def start(self, n_workers: int) -> EnvironmentDescription:
        """Start workers concurrently; returns the environment's description.

        Raises:
            ServiceStartError: a worker did not start; the first error if several did not.
            WorkerError: no process can be started.
        """
        try:
            async with asyncio.TaskGroup() as starting:
                tasks = [starting.create_task(self._start(number)) for number in range(n_workers)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return tasks[0].result()

    async def keep(self) -> None:
        """Replace workers that fail or are full until cancelled; after too many failures `take` raises the error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in tuple(self._up):
                    tasks.create_task(self._keep(number, tasks))
        except* (ServiceError, WorkerError) as failed:
            self._failure = _first_service_error(failed)
            self._changed.set()

    async def take(self, n_episodes: int = 1) -> EnvironmentWorker:
        """Return the worker with the fewest open episodes, for one more episode (1) or a problem request (0); waits for one.

        Raises:
            ServiceError: workers failed too often, or could not be restarted.
        """
        if not self._can_take:
            with span("waiting_for_environment", cause="no worker"):
                while not self._can_take:
                    self._changed.clear()
                    await self._changed.wait()
        if self._failure is not None:
            # A new object each time: a raised error keeps the frames of every episode that it was raised in.
            raise type(self._failure)(*self._failure.args)
        open_ones = [worker for worker in self._up.values() if worker.is_open]
        worker = min(open_ones, key=lambda each: (each.n_open, each.n_taken))
        worker.begin_request(n_episodes)
        return worker

    @property
    def _can_take(self) -> bool:
        return self._failure is not None or any(worker.is_open for worker in self._up.values())

    async def stop(self) -> None:
        """Stop all workers."""
        await asyncio.gather(*(worker.process.stop("was ended with the run") for worker in self._alive))

    async def _start(self, number: int) -> EnvironmentDescription:
        worker, description = await EnvironmentWorker.start(
            number, self._config, self._logs, self._stop_grace_s, self._changed
        )
        self._alive.add(worker)
        self._up[number] = worker
        self._changed.set()
        return description

    async def _end(self, worker: EnvironmentWorker, reason: str) -> None:
        await worker.process.stop(reason)
        self._alive.discard(worker)

    async def _keep(self, number: int, tasks: asyncio.TaskGroup) -> None:
        """Replace the worker with this number whenever it fails or is full; raise ServiceDiedError after too many failures."""
        failures_in_a_row = 0
        while True:
            worker = self._up[number]
            reason = await _wait_for_first(worker.wait_for_failure(), worker.reached_limit)
            del self._up[number]
            if not reason:
                # Its open episodes are played to their end while its successor starts.
                tasks.create_task(self._drain(worker))
            else:
                await self._end(worker, reason)
                self.restarts += 1
                failures_in_a_row = 0 if worker.n_ended else failures_in_a_row + 1
                if failures_in_a_row > MAX_RESTARTS:
                    reason += f", and so did {MAX_RESTARTS} before it; none of them finished an episode"
                    raise ServiceDiedError(worker.process.name, reason, worker.process.log_tail())
            await self._start(number)

    async def _drain(self, worker: EnvironmentWorker) -> None:
        """Wait until a worker's last episode has ended or the worker fails, then stop it."""
        reason = await _wait_for_first(worker.wait_for_failure(), worker.is_empty)
        await self._end(worker, reason or "has had its episodes")


async def _wait_for_first(failed: Coroutine[None, None, str], event: asyncio.Event) -> str:
    """Wait for a failure or an event; returns the failure's description, empty for the event."""
    failure, happened = asyncio.ensure_future(failed), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([failure, happened], return_when=asyncio.FIRST_COMPLETED)
        return failure.result() if failure.done() else ""
    finally:
        failure.cancel()
        happened.cancel()


def _first_service_error(failed: BaseExceptionGroup[BaseException]) -> ServiceError:
    """Return the first error of a group; a WorkerError is converted to a ServiceDiedError with its text."""
    first = failed.exceptions[0]
    return first if isinstance(first, ServiceError) else ServiceDiedError("environment workers", str(first))
