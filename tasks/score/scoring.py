"""The run's scorer, and where it runs: the one thing with which flows score."""

import asyncio
import inspect
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

from tasks.errors import ScoreError, text_of
from tasks.observe.metrics import Metric
from tasks.score.calls import Calls, InWorkers, OnLoop
from tasks.score.candidate import CandidateText
from tasks.score.config import ScoreConfig
from tasks.score.load import Load
from tasks.score.registry import Part, parts_of
from tasks.score.score_rows import candidates_of, score_rows
from tasks.score.verdict import Verdict
from tasks.score.weighted import weighted
from tasks.score.worker_pool import WorkerPool
from tasks.store.rows import Rows, where_in

SCORABLE = ("complete", "truncated")


def scorable(rollouts: Rows) -> Rows:
    """The rows that ended by themselves or at a length limit; failed and cancelled ones get no score."""
    return where_in(rollouts, "status", SCORABLE)


class Scoring:
    """Asynchronous scorers run on the event loop, others in worker processes that end with this context.

    Args:
        config: the settings.
        run: id of the run, for the rows.
        scorer: another one than the configuration's, for evaluation.

    Attributes:
        key: NAME@VERSION.
        by_group: True when the scorer wants a group's survivors together.

    Raises:
        ConfigError: there is no such scorer, or it lacks a setting.
    """

    def __init__(self, config: ScoreConfig, run: str, scorer: str = "") -> None:
        self._config, self._run = config, run
        self._scorer = parts_of(config, scorer)
        self.key = f"{self._scorer.name}@{self._scorer.version}"
        self.by_group = self._scorer.by_group
        self._loads = {True: Load("calls", config.max_in_flight), False: Load("workers", config.workers)}
        self._calls: list[Calls] = []
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start the worker processes; ScoreError when they cannot be."""
        async with self._open:
            pool = await self._started_pool()
            for part in self._scorer.parts:
                self._open.push_async_callback(_close, part, self._config.timeout_s)
                self._calls.append(self._calls_of(part, pool))
            self._open = self._open.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def score(self, rollouts: Rows, *, step: int) -> Rows:
        """Rows of `scores`, one for each row given, in order; whatever the scorer does is a row.

        Args:
            rollouts: scorable rows; when `by_group`, all survivors of one group.
            step: their step.
        """
        candidates = candidates_of(rollouts)
        verdicts = await self._verdicts(candidates) if candidates else []
        scorer = (self._scorer.name, self._scorer.version)
        return score_rows(self._run, step, scorer, rollouts, verdicts)

    def metrics(self) -> list[Metric]:
        """Calls that waited and ran, restarts of workers and timeouts, since the last time."""
        return [metric for load in self._loads.values() for metric in load.metrics()]

    async def _verdicts(self, candidates: Sequence[CandidateText]) -> list[Verdict]:
        parts = self._scorer.parts
        async with asyncio.TaskGroup() as calling:
            asked = [
                calling.create_task(_all_calls(part, calls, candidates))
                for part, calls in zip(parts, self._calls, strict=True)
            ]
        by_part = [each.result() for each in asked]
        if not self._scorer.is_sum:
            return by_part[0]
        return [weighted(parts, verdicts) for verdicts in zip(*by_part, strict=True)]

    def _workers_parts(self) -> list[Part]:
        return [part for part in self._scorer.parts if not part.function.is_async]

    async def _started_pool(self) -> WorkerPool | None:
        paths = [part.path for part in self._workers_parts()]
        if not paths:
            return None
        config = self._config
        settings = config.model_dump_json().encode()
        pool = WorkerPool(paths, settings, config.workers, config.worker_start_timeout_s, self._loads[False])
        return await self._open.enter_async_context(pool)

    def _calls_of(self, part: Part, pool: WorkerPool | None) -> Calls:
        load, timeout_s = self._loads[part.function.is_async], self._config.timeout_s
        label = f"/{part.function.name}" if len(self._scorer.parts) > 1 else ""
        if pool is None or part.function.is_async:
            return OnLoop(part.function, load, timeout_s, label)
        return InWorkers(part.function, pool, self._workers_parts().index(part), load, timeout_s, label)


async def _all_calls(part: Part, calls: Calls, candidates: Sequence[CandidateText]) -> list[Verdict]:
    groups = [candidates] if part.function.by_group else [[candidate] for candidate in candidates]
    return [verdict for verdicts in await calls.made(groups) for verdict in verdicts]


async def _close(part: Part, timeout_s: float) -> None:
    """Close a scorer that can be; ScoreError when that fails, or takes longer than `timeout_s`."""
    why = f"the scorer {part.function.name} cannot be closed"
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await _closed(part)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # foreign code: SystemExit too
        if limit.expired():
            raise ScoreError(f"{why} within score.timeout_s = {timeout_s:g} s") from None
        raise ScoreError(f"{why}: {type(error).__name__}: {text_of(error)}") from error


async def _closed(part: Part) -> None:
    closed = getattr(part.function.owner, "close", _nothing)()
    if inspect.isawaitable(closed):
        await closed


def _nothing() -> None:
    """What a scorer without `close` has to close."""
