"""Where a scorer runs: on the event loop, or in worker processes. Whatever it does comes back as verdicts."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tasks.errors import ScoreError, ScoreTimeoutError
from tasks.score.candidate import CandidateText
from tasks.score.function import ScoreFunction
from tasks.score.load import Load
from tasks.score.verdict import Verdict, failed, lasting, verdicts_of
from tasks.score.worker_pool import WorkerPool

MOST_IN_A_SHARE = 16
"""Calls that a worker is given at once: enough that it need not wait for the flow, few enough that others wait not
long for their turn."""

Call: TypeAlias = Sequence[CandidateText]
"""What a scorer is given at once: one candidate, or those of a group."""


class Calls(Protocol):
    """One way to call a scorer."""

    async def made(self, calls: Sequence[Call]) -> list[list[Verdict]]:
        """A verdict for each candidate of each call."""


@dataclass(frozen=True, slots=True)
class OnLoop:
    """Calls of an asynchronous scorer."""

    function: ScoreFunction
    load: Load
    timeout_s: float

    async def made(self, calls: Sequence[Call]) -> list[list[Verdict]]:
        async with asyncio.TaskGroup() as making:
            made = [making.create_task(self._verdicts(call)) for call in calls]
        return [
            [failed(_cancelled())] * len(call) if each.cancelled() else each.result()
            for call, each in zip(calls, made, strict=True)
        ]

    async def _verdicts(self, call: Call) -> list[Verdict]:
        async with self.load.slot():
            started = time.perf_counter()
            try:
                given = await self._given(call)
                verdicts = verdicts_of(given, len(call), by_group=self.function.by_group)
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - scorers are foreign code: SystemExit too is a failed score
                verdicts = [failed(error)] * len(call)
            return lasting(verdicts, time.perf_counter() - started)

    async def _given(self, call: Call) -> object:
        candidates = [text.parsed() for text in call]
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await self.function.call(candidates if self.function.by_group else candidates[0])
        except TimeoutError:
            if not limit.expired():
                raise  # the scorer's own
            self.load.timeouts += 1
            raise ScoreTimeoutError(f"no score within score.timeout_s = {self.timeout_s:g} s") from None


def _cancelled() -> ScoreError:
    """Of a call whose task was cancelled while nobody cancelled the flow."""
    return ScoreError("the scorer was cancelled, by itself or by something that it waited for")


@dataclass(frozen=True, slots=True)
class InWorkers:
    """Calls of a scorer that computes, in equal shares for all workers, and none too large.

    Attributes:
        number: the scorer's among those of the pool.
        load: the pool's.
    """

    pool: WorkerPool
    number: int
    load: Load
    timeout_s: float

    async def made(self, calls: Sequence[Call]) -> list[list[Verdict]]:
        size = min(MOST_IN_A_SHARE, -(-len(calls) // self.pool.n_workers))
        async with asyncio.TaskGroup() as making:
            shares = [
                making.create_task(self._share(calls[first : first + size]))
                for first in range(0, len(calls), size)
            ]
        return [verdicts for share in shares for verdicts in share.result()]

    async def _share(self, calls: Sequence[Call]) -> list[list[Verdict]]:
        async with self.load.slot(len(calls)):
            return await self.pool.made(self.number, calls, self.timeout_s)
