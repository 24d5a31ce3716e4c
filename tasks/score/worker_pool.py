"""Worker processes for scorers that compute.

No library's pool: concurrent.futures cannot end a call, and breaks with the first worker that dies; pebble ends
calls, but an idle worker that dies breaks its pool for good, what a scorer started outlives it, and each new
worker imports the flow's main module again (two seconds of a core under Prefect).
"""

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

from tasks.errors import ScoreError, ScoreTimeoutError
from tasks.score.candidate import CandidateText
from tasks.score.load import Load
from tasks.score.verdict import Verdict
from tasks.score.worker import Call
from tasks.score.worker_process import WorkerProcess


class WorkerPool:
    """Workers that are warmed at the start; one that hangs or dies is replaced, and only its call fails.

    Args:
        paths: import paths of the scorers, which calls name by their number.
        n_workers: processes, and calls at the same time.
        start_timeout_s: seconds until a new worker must have imported the scorers.
        load: of as many slots as there are workers; counts restarts and timeouts.
    """

    def __init__(self, paths: Sequence[str], n_workers: int, start_timeout_s: float, load: Load) -> None:
        self._paths, self._start_timeout_s, self._load = paths, start_timeout_s, load
        self._workers: list[WorkerProcess | None] = [None] * n_workers
        self._idle = list(range(n_workers))

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as starting:
                for lane in self._idle:
                    starting.create_task(self._ready(lane))
        except BaseExceptionGroup as errors:
            await self._end()
            raise errors.exceptions[0] from None
        except asyncio.CancelledError:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def call(self, scorer: int, candidates: Sequence[CandidateText], timeout_s: float) -> list[Verdict]:
        """Have one call's candidates scored; the caller holds a slot of the load, so that a worker is idle.

        Raises:
            ScoreTimeoutError: it took longer than `timeout_s` seconds, and was ended.
            ScoreWorkerError: the worker died.
            ScoreError: no new worker could be started.
        """
        call: Call = (scorer, candidates)
        async with self._worker() as worker:
            try:
                async with asyncio.timeout(timeout_s):
                    verdicts: list[Verdict] = pickle.loads(await worker.ask(pickle.dumps(call)))
                    return verdicts
            except TimeoutError:
                self._load.timeouts += 1
                raise ScoreTimeoutError(f"no score within score.timeout_s = {timeout_s:g} s") from None

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerProcess]:
        """A worker for one call, which is replaced when the call does not end well."""
        lane = self._idle.pop()
        try:
            yield await self._ready(lane)
        except Exception:
            self._load.restarts += 1
            self._kill(lane)
            with suppress(ScoreError):  # the next call tries again, and says so
                self._workers[lane] = await WorkerProcess.start(self._paths)
            raise
        except BaseException:
            self._kill(lane)
            raise
        finally:
            self._idle.append(lane)

    async def _ready(self, lane: int) -> WorkerProcess:
        worker = self._workers[lane]
        if worker is None or worker.has_ended:
            self._kill(lane)
            worker = self._workers[lane] = await WorkerProcess.start(self._paths)
        await worker.ready(self._start_timeout_s)
        return worker

    def _kill(self, lane: int) -> WorkerProcess | None:
        worker, self._workers[lane] = self._workers[lane], None
        if worker is not None:
            worker.kill()
        return worker

    async def _end(self) -> None:
        killed = [self._kill(lane) for lane in range(len(self._workers))]
        for worker in killed:
            if worker is not None:
                await worker.gone()
