"""Worker processes for scorers that compute.

Library pools do not fit: concurrent.futures cannot interrupt a call, and breaks when a worker dies. pebble interrupts calls, but
an idle worker that dies breaks its pool permanently, subprocesses of a scorer survive, and each new worker imports the flow's
main module again (two CPU seconds under Prefect).
"""

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from rollmill.tasks.errors import (
    ForeignError,
    RollmillError,
    ScoreError,
    ScoreTimeoutError,
    WorkerError,
    WorkerKilledError,
    WorkerTimeoutError,
)
from rollmill.tasks.processes.python_child import python_command
from rollmill.tasks.score.call_slots import CallSlots
from rollmill.tasks.score.scorer import CandidateText
from rollmill.tasks.score.verdict import ScoreVerdict, set_duration, verdict_from_error
from rollmill.tasks.user_code.worker_process import WorkerProcess, select_user_variables

WORKER_COMMAND = tuple(python_command("rollmill.tasks.score.score_worker"))


class ScoreWorkerPool:
    """Worker processes that have imported the scorers; one that hangs or dies is replaced, and only its call fails.

    A call whose worker is killed is made once more.

    Args:
        scorers: import paths of the scorers with their arguments by name; calls refer to them by index.
        settings: ScoreConfig as JSON, for scorers created from it.
        n_workers: number of processes, and of concurrent calls.
        start_timeout_s: seconds until a new worker must have imported the scorers.
        load: slots, as many as workers; counts restarts and timeouts.
        env_variables: `rollout.env_variables`, see `select_user_variables`.
    """

    def __init__(
        self,
        scorers: Sequence[tuple[str, Mapping[str, Any]]],
        settings: bytes,
        n_workers: int,
        start_timeout_s: float,
        load: CallSlots,
        env_variables: Sequence[str] = (),
    ) -> None:
        self._start = pickle.dumps((list(scorers), settings))
        self._start_timeout_s, self._load, self._env_variables = start_timeout_s, load, env_variables
        self._workers: list[WorkerProcess | None] = [None] * n_workers
        self._idle = list(range(n_workers))

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as starting:
                for lane in self._idle:
                    starting.create_task(self._ready(lane))
        except BaseException as error:
            await self._end()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    @property
    def n_workers(self) -> int:
        """Number of worker processes."""
        return len(self._workers)

    async def call(
        self, scorer: int, calls: Sequence[Sequence[CandidateText]], timeout_s: float
    ) -> list[list[ScoreVerdict]]:
        """Run calls of a scorer one after another and return the verdicts of each; a call may take `timeout_s` seconds.

        A worker that hangs or dies in a call is replaced before the following calls. The caller must hold a slot of `load`, so
        that a worker is idle. `scorer` is the index of its import path.
        """
        found: list[list[ScoreVerdict]] = []
        repeated = -1
        while (number := len(found)) < len(calls):
            try:
                await self._call_until_one_fails(
                    scorer, calls[number:], timeout_s, found, is_repeated=repeated == number
                )
            except WorkerKilledError:
                repeated = len(found)
        return found

    async def _call_until_one_fails(
        self,
        scorer: int,
        calls: Sequence[Sequence[CandidateText]],
        timeout_s: float,
        found: list[list[ScoreVerdict]],
        *,
        is_repeated: bool,
    ) -> None:
        """Append the verdicts of each call to `found`, up to the first that fails, whose verdicts are failed.

        Raises:
            WorkerKilledError: the worker was killed in a call that is to be repeated; the first one is none if `is_repeated`.
        """
        started, n_before = time.perf_counter(), len(found)
        try:
            async with self._worker() as worker:
                answers = [worker.send(pickle.dumps((scorer, call))) for call in calls]
                for answer in answers:
                    started = time.perf_counter()
                    found.append(pickle.loads(await worker.receive(answer, timeout_s)))
        except WorkerTimeoutError:
            self._load.timeouts += 1
            error: RollmillError = ScoreTimeoutError(f"no score within score.timeout_s = {timeout_s:g} s")
        except (ScoreError, WorkerError) as raised:
            if isinstance(raised, WorkerKilledError) and not (is_repeated and len(found) == n_before):
                raise
            error = raised
        else:
            return
        verdicts = [verdict_from_error(error)] * len(calls[len(found) - n_before])
        found.append(set_duration(verdicts, time.perf_counter() - started))

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerProcess]:
        """Take an idle worker until the block ends; the worker is replaced if the block raises."""
        lane = self._idle.pop()
        try:
            yield await self._ready(lane)
        except Exception:
            self._load.restarts += 1
            self._kill(lane)
            with suppress(WorkerError):
                # The next call tries again and reports the failure.
                await self._start_worker(lane)
            raise
        except BaseException:
            self._kill(lane)
            raise
        finally:
            self._idle.append(lane)

    async def _ready(self, lane: int) -> WorkerProcess:
        """Return worker number `lane` once it has imported its scorers; a dead one is started again.

        Raises:
            ScoreError: importing failed, or took too long, or no process can be started.
        """
        try:
            worker = self._workers[lane]
            if worker is None or worker.is_dead:
                self._kill(lane)
                worker = await self._start_worker(lane)
            await worker.wait_until_ready(self._start_timeout_s)
        except WorkerTimeoutError:
            raise ScoreError(f"a score worker was not ready within {self._start_timeout_s:g} s") from None
        except ForeignError as error:
            raise ScoreError(f"a score worker cannot import its scorers: {error}") from error
        except WorkerError as error:
            raise ScoreError(str(error)) from error
        return worker

    async def _start_worker(self, lane: int) -> WorkerProcess:
        # Killed without a grace period: a hanging scorer does not end, and has nothing to save.
        worker = self._workers[lane] = await WorkerProcess.start(
            "the worker process",
            WORKER_COMMAND,
            self._start,
            log=None,
            stop_grace_s=0.0,
            variables=select_user_variables(self._env_variables),
        )
        return worker

    def _kill(self, lane: int) -> WorkerProcess | None:
        worker, self._workers[lane] = self._workers[lane], None
        if worker is not None:
            worker.begin_stop()
        return worker

    async def _end(self) -> None:
        killed = [self._kill(lane) for lane in range(len(self._workers))]
        await asyncio.gather(*(worker.stop() for worker in killed if worker is not None))
