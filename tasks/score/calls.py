"""Where a scorer runs: on the event loop, or in worker processes. Whatever it does comes back as verdicts."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tasks.errors import ScoreError, ScoreTimeoutError
from tasks.observe.spans import NS, current_lane, span, within
from tasks.score.candidate import CandidateText
from tasks.score.function import ScoreFunction
from tasks.score.load import Load
from tasks.score.verdict import Verdict, failed, lasting, verdicts_of
from tasks.score.worker_pool import WorkerPool
from tasks.store.attempts import short_id

MOST_IN_A_SHARE = 16
"""Calls that a worker is given at once: enough that it need not wait for the flow, few enough that others wait not
long for their turn."""

QUEUE = "waiting_for_scorer"
"""The span of a call that waits for its turn."""

Call: TypeAlias = Sequence[CandidateText]
"""What a scorer is given at once: one candidate, or those of a group."""


class Calls(Protocol):
    """One way to call a scorer."""

    async def made(self, calls: Sequence[Call]) -> list[list[Verdict]]:
        """A verdict for each candidate of each call."""


@dataclass(frozen=True, slots=True)
class OnLoop:
    """Calls of an asynchronous scorer.

    Attributes:
        label: ends the lanes of its spans, where a trajectory has several scorers at once.
    """

    function: ScoreFunction
    load: Load
    timeout_s: float
    label: str = ""

    async def made(self, calls: Sequence[Call]) -> list[list[Verdict]]:
        async with asyncio.TaskGroup() as making:
            made = [making.create_task(self._verdicts(call)) for call in calls]
        return [
            [failed(_cancelled())] * len(call) if each.cancelled() else each.result()
            for call, each in zip(calls, made, strict=True)
        ]

    async def _verdicts(self, call: Call) -> list[Verdict]:
        with within(lane=_lane_of(call, self.function) + self.label):
            queue = span(QUEUE, cause=self.load.name).begin(current_lane())
            async with self.load.slot():
                queue.end()
                scoring = span("scoring")
                with scoring:
                    verdicts = await self._made(call)
                return lasting(verdicts, scoring.duration_s)

    async def _made(self, call: Call) -> list[Verdict]:
        try:
            given = await self._given(call)
            return verdicts_of(given, len(call), by_group=self.function.by_group)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - scorers are foreign code: SystemExit too is a failed score
            return [failed(error)] * len(call)

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


def _lane_of(call: Call, function: ScoreFunction) -> str:
    """Of a trajectory its own, of those of a group together the group's."""
    place = short_id(call[0].trajectory_id)
    return place.partition(".")[0] if function.by_group else place


def _cancelled() -> ScoreError:
    """Of a call whose task was cancelled while nobody cancelled the flow."""
    return ScoreError("the scorer was cancelled, by itself or by something that it waited for")


@dataclass(frozen=True, slots=True)
class InWorkers:
    """Calls of a scorer that computes, in equal shares for all workers, and none too large.

    Attributes:
        number: the scorer's among those of the pool.
        load: the pool's.
        label: ends the lanes of its spans, where a trajectory has several scorers at once.
    """

    function: ScoreFunction
    pool: WorkerPool
    number: int
    load: Load
    timeout_s: float
    label: str = ""

    async def made(self, calls: Sequence[Call]) -> list[list[Verdict]]:
        size = min(MOST_IN_A_SHARE, -(-len(calls) // self.pool.n_workers))
        async with asyncio.TaskGroup() as making:
            shares = [
                making.create_task(self._share(calls[first : first + size]))
                for first in range(0, len(calls), size)
            ]
        return [verdicts for share in shares for verdicts in share.result()]

    async def _share(self, calls: Sequence[Call]) -> list[list[Verdict]]:
        queued = time.perf_counter_ns()
        async with self.load.slot(len(calls)):
            began = time.perf_counter_ns()
            made = await self.pool.made(self.number, calls, self.timeout_s)
            self._book(calls, made, queued, began)
            return made

    def _book(
        self, calls: Sequence[Call], made: Sequence[Sequence[Verdict]], queued: int, began: int
    ) -> None:
        """Book the calls of a share to its trajectories, one after another, each as long as its worker says."""
        if (lane := current_lane()) is None:
            return
        for call, verdicts in zip(calls, made, strict=True):
            ended = began + round(max(each.duration_s for each in verdicts) / NS)
            own = lane.beside(_lane_of(call, self.function) + self.label)
            own.add(QUEUE, queued, began, self.load.name)
            own.add("scoring", began, ended)
            began = ended
