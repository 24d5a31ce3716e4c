"""Score the rows of one part of a group, off the event loop."""

import asyncio
import json
import math
import time
from concurrent.futures import Executor
from functools import partial
from typing import Self, TypeAlias

from tasks.observe.metrics import Metric
from tasks.score.config import ScoreConfig
from tasks.score.scorer import Candidate, Reward, Scorer, scorer_of
from tasks.score.workers import run_in, score_workers
from tasks.store.rows import Rows, where_in
from tasks.store.schemas import batch_of

SCORABLE = ("complete", "truncated")

Result: TypeAlias = tuple[Reward, Exception | None, float]
"""Reward, error if scoring failed, seconds."""


def score_rows(scorer: Scorer, run: str, step: int, rows: Rows) -> Rows:
    """Rows of `scores`, one for each row of `rollouts`."""
    rollouts = rows.select(_READ).to_pylist()
    return _score_rows(scorer, run, step, rollouts, [_score(scorer, _candidate(row)) for row in rollouts])


def _score_rows(
    scorer: Scorer, run: str, step: int, rollouts: list[dict[str, str]], results: list[Result]
) -> Rows:
    return batch_of(
        "scores",
        {
            "run": [run] * len(rollouts),
            "step": [step] * len(rollouts),
            "group": [row["group"] for row in rollouts],
            "sample": [row["sample"] for row in rollouts],
            "trajectory_id": [row["trajectory_id"] for row in rollouts],
            "scorer": [scorer.name] * len(rollouts),
            "version": [scorer.version] * len(rollouts),
            "status": ["failed" if error else "scored" for _, error, _ in results],
            "error_type": [type(error).__name__ if error else "" for _, error, _ in results],
            "error": [str(error) if error else "" for _, error, _ in results],
            "reward": [reward.value for reward, _, _ in results],
            "components": [json.dumps(dict(reward.components)) for reward, _, _ in results],
            "subgroup": [0] * len(rollouts),
            "duration_s": [duration_s for _, _, duration_s in results],
        },
    )


async def score_off_loop(
    executor: Executor | None, scorer: Scorer, run: str, step: int, rows: Rows, timeout_s: float
) -> Rows:
    """`score_rows` in a worker process of `executor`, or in a thread when there is none.

    What takes longer than `timeout_s` seconds is a failed row for each rollout. A thread cannot be ended:
    it goes on beside the run.
    """
    try:
        return await run_in(executor, partial(score_rows, scorer, run, step, rows), timeout_s)
    except TimeoutError:
        late = TimeoutError(f"no score within score.timeout_s = {timeout_s:g} s")
        results: list[Result] = [(Reward(math.nan), late, timeout_s)] * rows.num_rows
        return _score_rows(scorer, run, step, rows.select(_READ).to_pylist(), results)


_READ = ["group", "sample", "trajectory_id", "status", "example", "messages"]


def _candidate(row: dict[str, str]) -> Candidate:
    return Candidate(
        trajectory_id=row["trajectory_id"],
        example=json.loads(row["example"]),
        messages=json.loads(row["messages"]),
        is_complete=row["status"] == "complete",
    )


def _score(scorer: Scorer, candidate: Candidate) -> tuple[Reward, Exception | None, float]:
    started = time.perf_counter()
    try:
        reward, error = scorer.score(candidate), None
        if not math.isfinite(reward.value):
            raise ValueError(f"scorer {scorer.name} gave the reward {reward.value}, expected a finite number")
    except Exception as raised:  # noqa: BLE001 - scorers are foreign code: a failed score is data
        reward, error = Reward(math.nan), raised
    return reward, error, time.perf_counter() - started


def scorable(rollouts: Rows) -> Rows:
    """The rows that ended by themselves or at a length limit; failed and cancelled ones get no score."""
    return where_in(rollouts, "status", SCORABLE)


class Scoring:
    """The run's scorer, and where it runs; the one thing that flows use to score.

    Args:
        scorer: another one than the configuration's, for evaluation.

    Attributes:
        key: NAME@VERSION.
        by_group: True when the scorer wants a group's survivors together.
    """

    def __init__(self, config: ScoreConfig, run: str, scorer: str = "") -> None:
        self._config, self._run = config, run
        self._scorer = scorer_of(scorer or config.scorer)
        self.key = f"{self._scorer.name}@{self._scorer.version}"
        self.by_group = False
        self._executor: Executor | None = None

    async def __aenter__(self) -> Self:
        self._executor = score_workers(self._config.workers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._executor is not None:
            await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    async def score(self, rollouts: Rows, *, step: int) -> Rows:
        """Rows of `scores`, one for each row given, in order; whatever the scorer does is a row.

        Args:
            rollouts: scorable rows; when `by_group`, all survivors of one group.
            step: their step.
        """
        return await score_off_loop(
            self._executor, self._scorer, self._run, step, rollouts, self._config.timeout_s
        )

    def metrics(self) -> list[Metric]:
        """What happened since the last call."""
        return []
