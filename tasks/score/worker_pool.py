"""Worker processes for scorers that compute.

No library's pool: concurrent.futures cannot end a call, and breaks with the first worker that dies; pebble ends
calls, but an idle worker that dies breaks its pool for good, what a scorer started outlives it, and each new
worker imports the flow's main module again (two seconds of a core under Prefect).
"""

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

from tasks.errors import ScoreError, ScoreTimeoutError
from tasks.score.candidate import CandidateText
from tasks.score.load import Load
from tasks.score.verdict import Verdict, failed, lasting
from tasks.score.worker_process import WorkerProcess


class WorkerPool:
    """Workers that are warmed at the start; one that hangs or dies is replaced, and only its call fails.

    Args:
        paths: import paths of the scorers, which calls name by their number.
        settings: a ScoreConfig as JSON, for scorers that are made from it.
        n_workers: processes, and calls at the same time.
        start_timeout_s: seconds until a new worker must have imported the scorers.
        load: of as many slots as there are workers; counts restarts and timeouts.
    """

    def __init__(
        self, paths: Sequence[str], settings: bytes, n_workers: int, start_timeout_s: float, load: Load
    ) -> None:
        self._paths, self._settings = paths, settings
        self._start_timeout_s, self._load = start_timeout_s, load
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

    @property
    def n_workers(self) -> int:
        """Worker processes."""
        return len(self._workers)

    async def made(
        self, scorer: int, calls: Sequence[Sequence[CandidateText]], timeout_s: float
    ) -> list[list[Verdict]]:
        """Have calls of a scorer made one after another, each within `timeout_s` seconds.

        A call that fails costs its worker, and the calls after it go to another. The caller holds a slot of the
        load, so that a worker is idle.
        """
        found: list[list[Verdict]] = []
        while len(found) < len(calls):
            found += await self._made_until_one_fails(scorer, calls[len(found) :], timeout_s)
        return found

    async def _made_until_one_fails(
        self, scorer: int, calls: Sequence[Sequence[CandidateText]], timeout_s: float
    ) -> list[list[Verdict]]:
        found: list[list[Verdict]] = []
        started = time.perf_counter()
        try:
            async with self._worker() as worker:
                async with asyncio.timeout(timeout_s):
                    await worker.send(pickle.dumps((scorer, calls)))
                for _ in calls:
                    started = time.perf_counter()
                    async with asyncio.timeout(timeout_s):
                        found.append(pickle.loads(await worker.receive()))
        except TimeoutError:
            self._load.timeouts += 1
            error: ScoreError = ScoreTimeoutError(f"no score within score.timeout_s = {timeout_s:g} s")
        except ScoreError as raised:
            error = raised
        else:
            return found
        verdicts = [failed(error)] * len(calls[len(found)])
        return [*found, lasting(verdicts, time.perf_counter() - started)]

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerProcess]:
        """A worker for some calls, which is replaced when they do not end well."""
        lane = self._idle.pop()
        try:
            yield await self._ready(lane)
        except Exception:
            self._load.restarts += 1
            self._kill(lane)
            with suppress(ScoreError):  # the next call tries again, and says so
                self._workers[lane] = await WorkerProcess.start(self._paths, self._settings)
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
            worker = self._workers[lane] = await WorkerProcess.start(self._paths, self._settings)
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
