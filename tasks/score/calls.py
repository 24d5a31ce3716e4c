"""Where a scorer runs: on the event loop, or in worker processes. Whatever it does comes back as verdicts."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.errors import ScoreError, ScoreTimeoutError
from tasks.score.candidate import CandidateText
from tasks.score.function import ScoreFunction
from tasks.score.load import Load
from tasks.score.verdict import Verdict, failed, lasting, verdicts_of
from tasks.score.worker_pool import WorkerPool


class Calls(Protocol):
    """One way to call a scorer."""

    async def call(self, candidates: Sequence[CandidateText]) -> list[Verdict]:
        """One call of it, for one candidate, or the candidates of a group: a verdict each."""


@dataclass(frozen=True, slots=True)
class OnLoop:
    """Calls of an asynchronous scorer."""

    function: ScoreFunction
    load: Load
    timeout_s: float

    async def call(self, candidates: Sequence[CandidateText]) -> list[Verdict]:
        async with self.load.slot():
            started = time.perf_counter()
            try:
                given = await self._given(candidates)
                verdicts = verdicts_of(given, len(candidates), by_group=self.function.by_group)
            except Exception as error:  # noqa: BLE001 - scorers are foreign code: a failed score is data
                verdicts = [failed(error)] * len(candidates)
            return lasting(verdicts, time.perf_counter() - started)

    async def _given(self, texts: Sequence[CandidateText]) -> object:
        candidates = [text.parsed() for text in texts]
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await self.function.call(candidates if self.function.by_group else candidates[0])
        except TimeoutError:
            if not limit.expired():
                raise  # the scorer's own
            self.load.timeouts += 1
            raise ScoreTimeoutError(f"no score within score.timeout_s = {self.timeout_s:g} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ScoreError("the scorer was cancelled by something that it waited for") from None


@dataclass(frozen=True, slots=True)
class InWorkers:
    """Calls of a scorer that computes.

    Attributes:
        number: the scorer's among those of the pool.
        load: the pool's.
    """

    pool: WorkerPool
    number: int
    load: Load
    timeout_s: float

    async def call(self, candidates: Sequence[CandidateText]) -> list[Verdict]:
        async with self.load.slot():
            started = time.perf_counter()
            try:
                return await self.pool.call(self.number, candidates, self.timeout_s)
            except ScoreError as error:
                return lasting([failed(error)] * len(candidates), time.perf_counter() - started)
