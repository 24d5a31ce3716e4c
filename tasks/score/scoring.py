"""Run the configured scorer over rollout rows: candidates in, rows of `scores` out."""

import asyncio
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from itertools import chain
from typing import Self, TypeAlias

from rollmill.tasks.errors import ScoreError, ScoreTimeoutError, describe_error
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.spans import NS, current_lane, span, within
from rollmill.tasks.score.call_slots import CallSlots
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.score_function import ScoreFunction, settings_version
from rollmill.tasks.score.score_worker_pool import ScoreWorkerPool
from rollmill.tasks.score.scorer import CandidateText
from rollmill.tasks.score.terms import ScorerTerm, resolve_terms, sum_verdicts
from rollmill.tasks.score.verdict import (
    ScoreVerdict,
    check_positions,
    set_duration,
    verdict_from_error,
    verdicts_from_result,
)
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.rows import Rows, rows_where_in
from rollmill.tasks.store.schemas import SCORABLE_STATUSES, make_batch
from rollmill.tasks.user_code.plug_in import PlugIn

MAX_CALLS_PER_CHUNK = 16
"""Calls in one message to a worker. Large enough to keep a worker busy, small enough that other callers wait briefly."""

QUEUE_SPAN = "waiting_for_scorer"
"""The span of a call that waits for its turn."""

Call: TypeAlias = Sequence[CandidateText]
"""What a scorer is given at once: one candidate, or those of a group."""


@dataclass(frozen=True, slots=True)
class LoopCalls:
    """Calls an asynchronous scorer on the event loop, as many calls at once as `load` has slots.

    Attributes:
        label: suffix of its spans' lanes, for trajectories with several concurrent scorers.
    """

    function: ScoreFunction
    load: CallSlots
    timeout_s: float
    label: str = ""

    async def call(self, calls: Sequence[Call]) -> list[list[ScoreVerdict]]:
        """Call the scorer once for each element of `calls`; returns one verdict for each candidate of each call."""
        async with asyncio.TaskGroup() as making:
            results = [making.create_task(self._verdicts(call)) for call in calls]
        # A task may be cancelled although the flow is not.
        cancelled = ScoreError("the scorer was cancelled, by itself or by something that it waited for")
        return [
            [verdict_from_error(cancelled)] * len(call) if each.cancelled() else each.result()
            for call, each in zip(calls, results, strict=True)
        ]

    async def _verdicts(self, call: Call) -> list[ScoreVerdict]:
        with within(lane=_call_lane(call, self.function) + self.label):
            queue = span(QUEUE_SPAN, cause=self.load.name).begin(current_lane())
            async with self.load.slot():
                queue.end()
                scoring = span("scoring")
                with scoring:
                    verdicts = await self._call_once(call)
                return set_duration(verdicts, scoring.duration_s)

    async def _call_once(self, call: Call) -> list[ScoreVerdict]:
        try:
            given = await self._call_function(call)
            return verdicts_from_result(given, len(call), by_group=self.function.by_group)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - scorers are foreign code: SystemExit too is a failed score
            return [verdict_from_error(error)] * len(call)

    async def _call_function(self, call: Call) -> object:
        candidates = [text.parse() for text in call]
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await self.function.call(candidates if self.function.by_group else candidates[0])
        except TimeoutError:
            if not limit.expired():
                # The scorer itself raised TimeoutError.
                raise
            self.load.timeouts += 1
            raise ScoreTimeoutError(f"no score within score.timeout_s = {self.timeout_s:g} s") from None


def _call_lane(call: Call, function: ScoreFunction) -> str:
    """Return the lane of a call's spans: the short id of its trajectory, or the group's for a group scorer."""
    place = short_id(call[0].trajectory_id)
    return place.partition(".")[0] if function.by_group else place


@dataclass(frozen=True, slots=True)
class WorkerCalls:
    """Calls a synchronous scorer in worker processes; the calls are split evenly over the workers.

    Attributes:
        number: index of the scorer in the pool.
        load: slots of the pool.
        label: suffix of its spans' lanes, for trajectories with several concurrent scorers.
    """

    function: ScoreFunction
    pool: ScoreWorkerPool
    number: int
    load: CallSlots
    timeout_s: float
    label: str = ""

    async def call(self, calls: Sequence[Call]) -> list[list[ScoreVerdict]]:
        """As `LoopCalls.call`."""
        size = min(MAX_CALLS_PER_CHUNK, -(-len(calls) // self.pool.n_workers))
        async with asyncio.TaskGroup() as making:
            shares = [
                making.create_task(self._share(calls[first : first + size]))
                for first in range(0, len(calls), size)
            ]
        return [verdicts for share in shares for verdicts in share.result()]

    async def _share(self, calls: Sequence[Call]) -> list[list[ScoreVerdict]]:
        queued = time.perf_counter_ns()
        async with self.load.slot(len(calls)):
            began = time.perf_counter_ns()
            results = await self.pool.call(self.number, calls, self.timeout_s)
            self._record_spans(calls, results, queued, began)
            return results

    def _record_spans(
        self, calls: Sequence[Call], results: Sequence[Sequence[ScoreVerdict]], queued: int, began: int
    ) -> None:
        """Record the spans of calls that one worker made one after another, from the durations that it reported.

        The calls began to wait for a worker at `queued` and got one at `began`, both in nanoseconds of time.perf_counter_ns.
        """
        if (lane := current_lane()) is None:
            return
        for call, verdicts in zip(calls, results, strict=True):
            ended = began + round(max(each.duration_s for each in verdicts) / NS)
            own = lane.sibling(_call_lane(call, self.function) + self.label)
            own.add(QUEUE_SPAN, queued, began, self.load.name)
            own.add("scoring", began, ended)
            began = ended


# Seconds in which a new worker process must have imported its scorers; large libraries take half a minute.
START_TIMEOUT_S = 120.0

_CANDIDATE_COLUMNS = [each.name for each in fields(CandidateText)]


def score_rows(
    run: str, step: int, scorer: tuple[str, str], rollouts: Rows, verdicts: Sequence[ScoreVerdict]
) -> Rows:
    """Build the rows of the data set `scores` for rollouts with one verdict each, in order; `scorer` is (name, version)."""
    n, (name, version) = rollouts.num_rows, scorer
    return make_batch(
        "scores",
        {
            "run": [run] * n,
            "step": [step] * n,
            "group": rollouts.column("group"),
            "sample": rollouts.column("sample"),
            "trajectory_id": rollouts.column("trajectory_id"),
            "scorer": [name] * n,
            "version": [version] * n,
            "status": [verdict.status for verdict in verdicts],
            "error_type": [verdict.error_type for verdict in verdicts],
            "error": [verdict.error for verdict in verdicts],
            "reward": [verdict.reward for verdict in verdicts],
            "turn_rewards": [verdict.turn_rewards for verdict in verdicts],
            "token_rewards": [verdict.token_rewards for verdict in verdicts],
            "components": [json.dumps(dict(verdict.components)) for verdict in verdicts],
            "subgroup": [verdict.subgroup for verdict in verdicts],
            "duration_s": [verdict.duration_s for verdict in verdicts],
        },
    )


def select_scorable(rollouts: Rows) -> Rows:
    """Select the rows with status complete or truncated; failed and cancelled trajectories get no score."""
    return rows_where_in(rollouts, "status", SCORABLE_STATUSES)


def combined_key(keys: Mapping[str, str]) -> str:
    """Return the NAME@VERSION of scores by the scorers of several environments, whose NAME@VERSION are given by environment.

    Example: {"a": "exact@1", "b": "exact@1"} gives "exact@1"; with two scorers it is "environments@", followed by a digest of all.
    """
    if len(set(keys.values())) == 1:
        return next(iter(keys.values()))
    return f"environments@{settings_version(sorted(keys.items()))}"


class Scoring:
    """Runs the configured scorers: asynchronous ones on the event loop, others in processes that end with this context.

    `scorer`, if given, takes the place of the configured one, for evaluation. A new worker process must have imported its scorers
    within `start_timeout_s`; it has the environment variables of `select_user_variables`, and those that `env_variables` names.

    Attributes:
        key: NAME@VERSION of the scorer, under which its scores are stored.
        description: what the version is a digest of, as of `RewardTerms`.
        by_group: True if the scorer needs a group's survivors together.

    Raises:
        ConfigError: there is no such scorer, or it lacks a setting.
    """

    def __init__(
        self,
        config: ScoreConfig,
        run: str,
        scorer: PlugIn | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        env_variables: Sequence[str] = (),
    ) -> None:
        self._env_variables = env_variables
        self._config, self._run, self._start_timeout_s = config, run, start_timeout_s
        self._scorer = resolve_terms(config, scorer)
        self.key, self.description = self._scorer.key, self._scorer.description
        self.by_group = self._scorer.by_group
        self._loads = {
            True: CallSlots("calls", config.max_in_flight),
            False: CallSlots("workers", config.workers),
        }
        self._calls: list[LoopCalls | WorkerCalls] = []
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start the worker processes; raises ScoreError if they cannot be started."""
        async with self._open:
            pool = await self._start_pool()
            for part in self._scorer.parts:
                self._open.push_async_callback(_close_term, part, self._config.timeout_s)
                self._calls.append(self._create_calls(part, pool))
            self._open = self._open.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def score(self, rollouts: Rows, *, step: int) -> Rows:
        """Score rollouts and return rows of `scores`, one for each in order; a scorer's error becomes a row too.

        The rollouts must be scorable rows; if `by_group`, all survivors of one group.
        """
        candidates = [CandidateText(**row) for row in rollouts.select(_CANDIDATE_COLUMNS).to_pylist()]
        parts = self._scorer.parts
        verdicts: list[ScoreVerdict] = []
        if candidates:
            async with asyncio.TaskGroup() as calling:
                asked = []
                for part, calls in zip(parts, self._calls, strict=True):
                    groups = [candidates] if part.function.by_group else [[each] for each in candidates]
                    asked.append(calling.create_task(calls.call(groups)))
            by_part = [
                [
                    check_positions(verdict, len(each.turn_tokens), each.n_completion_tokens)
                    for verdict, each in zip(chain.from_iterable(asking.result()), candidates, strict=True)
                ]
                for asking in asked
            ]
            verdicts = (
                [
                    sum_verdicts(parts, of_terms, each.turn_tokens, each.n_completion_tokens)
                    for each, *of_terms in zip(candidates, *by_part, strict=True)
                ]
                if self._scorer.is_sum
                else by_part[0]
            )
        name, _, version = self.key.rpartition("@")
        return score_rows(self._run, step, (name, version), rollouts, verdicts)

    def store_as(self, key: str, description: str) -> None:
        """Have later scores stored under another NAME@VERSION, whose version is a digest of `description`."""
        self.key, self.description = key, description

    def metrics(self) -> list[Metric]:
        """Return the peaks of pending and running calls, and the worker restarts and timeouts, since the last call."""
        return [metric for load in self._loads.values() for metric in load.metrics()]

    def _workers_parts(self) -> list[ScorerTerm]:
        return [part for part in self._scorer.parts if not part.function.is_async]

    async def _start_pool(self) -> ScoreWorkerPool | None:
        scorers = [(part.path, part.args) for part in self._workers_parts()]
        if not scorers:
            return None
        config = self._config
        settings = config.model_dump_json().encode()
        limits = (config.workers, self._start_timeout_s, self._loads[False])
        pool = ScoreWorkerPool(scorers, settings, *limits, self._env_variables)
        return await self._open.enter_async_context(pool)

    def _create_calls(self, part: ScorerTerm, pool: ScoreWorkerPool | None) -> LoopCalls | WorkerCalls:
        load, timeout_s = self._loads[part.function.is_async], self._config.timeout_s
        label = f"/{part.label}" if len(self._scorer.parts) > 1 else ""
        if pool is None or part.function.is_async:
            return LoopCalls(part.function, load, timeout_s, label)
        return WorkerCalls(part.function, pool, self._workers_parts().index(part), load, timeout_s, label)


async def _close_term(part: ScorerTerm, timeout_s: float) -> None:
    """Call the `close` method of a term's scorer, if any; raises ScoreError if it fails or takes over `timeout_s` seconds."""
    why = f"the scorer {part.function.name} cannot be closed"
    try:
        async with asyncio.timeout(timeout_s) as limit:
            # `close` may be asynchronous, as `score` may.
            if close := getattr(part.function.owner, "close", None):
                closed = close()
                if inspect.isawaitable(closed):
                    await closed
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # Foreign code: SystemExit too.
        if limit.expired():
            raise ScoreError(f"{why} within score.timeout_s = {timeout_s:g} s") from None
        raise ScoreError(f"{why}: {': '.join(describe_error(error))}") from error
