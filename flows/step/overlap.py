"""What runs concurrently with training: the next steps' rollouts, and the evaluation of the current policy version."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self

from prefect.utilities.annotations import quote

from rollmill.flows.run.live_run import Run
from rollmill.flows.step.held_out import evaluate_version
from rollmill.flows.step.step_collection import CollectedStep, collect_step
from rollmill.flows.step.step_space import StepSpace
from rollmill.tasks.errors import DiskSpaceError
from rollmill.tasks.observe.spans import current_lane, within


class StepPipeline:
    """Async context manager that collects steps and evaluates policy versions in the background, while training runs.

    With `rollout.max_staleness: k` the rollouts of step s begin once the servers have version s - k, and not earlier. So no
    trained token is from an older version, and no finished rollout is ever too stale to be trained on. The servers evaluate a
    version while they have it: the next sync waits for the rest of the evaluation.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks = asyncio.TaskGroup()
        self._space = StepSpace(run)
        self._collecting: dict[int, asyncio.Task[CollectedStep | DiskSpaceError]] = {}
        self._evaluating: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._tasks.__aexit__(*details)

    def begin(self, version: int, after: Sequence[object] = ()) -> None:
        """Start to evaluate a version that is now on the servers, and to collect each step that may sample from it.

        Args:
            version: the policy version.
            after: results of the task runs that the steps and the evaluation follow in Prefect's graph.
        """
        run = self._run
        for step in range(version, min(version + run.config.rollout.max_staleness + 1, run.config.steps)):
            # Steps up to max_staleness ahead were begun with an earlier version.
            if step not in self._collecting:
                self._collecting[step] = self._tasks.create_task(self._collect(step, after))
        self._evaluating[version] = self._tasks.create_task(self._evaluate(version, after))

    async def collect(self, step: int) -> CollectedStep:
        """Wait until all groups of a step that `begin` started are stored, and return the step.

        Raises:
            DiskSpaceError: the disk would not hold the step, or its training; what was begun before is done.
        """
        waited_ns = time.perf_counter_ns()
        collected = await self._collecting[step]
        del self._collecting[step]
        if isinstance(collected, DiskSpaceError):
            raise collected
        if (lane := current_lane()) and (now := time.perf_counter_ns()) > collected.few_left_ns:
            lane.add("waiting_for_stragglers", max(waited_ns, collected.few_left_ns), now)
        # Earlier steps were trained and later ones collected since the check before this step was begun.
        await self._space.check(step, is_collected=True)
        return collected

    async def finish_evaluation(self, version: int) -> None:
        """Wait until the evaluation of a version, which `begin` started, has ended; return at once if a call has done so."""
        if evaluating := self._evaluating.pop(version, None):
            await evaluating

    async def _collect(self, step: int, after: Sequence[object]) -> CollectedStep | DiskSpaceError:
        """Collect a step; return a DiskSpaceError instead of raising it, so that earlier steps continue."""
        try:
            await self._space.check(step)
        except DiskSpaceError as error:
            return error
        with within(step=step, lane=f"collect.{step}"):
            if not self._run.task_runs.records_steps:
                return await collect_step.fn(self._run, step)
            self._run.recording.count_start()
            # Without quote, Prefect would search all that a run consists of for the results of tasks.
            return await collect_step(quote(self._run), step, wait_for=after)

    async def _evaluate(self, version: int, after: Sequence[object]) -> None:
        """Evaluate a version if that is due; record its spans under step `version`, or under the run's last step."""
        with within(step=min(version, self._run.config.steps - 1), lane=f"evaluate.{version}"):
            await evaluate_version(self._run, version, after)
