"""What goes on beside training: the next steps' rollouts, and the evaluation of the policy's version."""

import asyncio
import time
from types import TracebackType
from typing import Self

from flows.evaluate import evaluate_version, is_due
from flows.groups.collectors import Collectors
from flows.groups.fan_out import Collected, collect_step
from flows.running.run import Run
from flows.running.space import StepSpace
from flows.ui.step_runs import name_of_evaluation, name_of_step
from tasks.errors import DiskSpaceError
from tasks.observe.spans import current_lane, span, within
from tasks.store.kind import done_steps

STEPS_AHEAD = 2
"""So many steps more than begin next have their flow runs made: steps may be shorter than it takes."""


class Beside:
    """Collects steps, and evaluates versions, while the trainer works; an async context manager.

    With `rollout.max_staleness: k` the rollouts of step s begin once the servers are at version s - k, never
    earlier: so no trained token is by a version further behind, and nothing finished is ever thrown away for
    being stale. A version is evaluated by the servers while they have it: the next sync waits for the rest.
    """

    def __init__(self, run: Run, collectors: Collectors | None = None) -> None:
        self._run, self._collectors = run, collectors
        self._tasks = asyncio.TaskGroup()
        self._space = StepSpace(run)
        self._collecting: dict[int, asyncio.Task[Collected | DiskSpaceError]] = {}
        self._evaluating: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        with span("opening"):
            done = await asyncio.to_thread(done_steps, self._run.folder, self._run.store.manifest)
        self._run.step_runs.expect(self._names(len(done)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    def begin(self, version: int) -> None:
        """Start all that may go on now that the servers are at `version`: its evaluation, and its steps' rollouts."""
        run = self._run
        for step in range(version, min(version + run.config.rollout.max_staleness + 1, run.config.steps)):
            if step not in self._collecting:
                self._collecting[step] = self._tasks.create_task(self._collect(step))
        self._evaluating[version] = self._tasks.create_task(self._evaluate(version))
        run.step_runs.expect(self._names(version + 1))

    async def collected(self, step: int) -> Collected:
        """A step that was begun, once all its groups are done.

        Raises:
            DiskSpaceError: the disk would not hold it, or not its training; all that was begun before is done.
        """
        waited_ns = time.perf_counter_ns()
        collected = await self._collecting[step]
        del self._collecting[step]
        if isinstance(collected, DiskSpaceError):
            raise collected
        if (lane := current_lane()) and (now := time.perf_counter_ns()) > collected.few_left_ns:
            lane.add("waiting_for_stragglers", max(waited_ns, collected.few_left_ns), now)
        await self._space.check(step, is_collected=True)
        return collected

    async def _collect(self, step: int) -> Collected | DiskSpaceError:
        """Collect a step; one that is not begun since the disk is full does not end what goes on beside it."""
        try:
            await self._space.check(step)
        except DiskSpaceError as error:
            return error
        with within(step=step, lane=f"collect.{step}"):
            async with self._run.step_runs.of(name_of_step(step)):
                return await collect_step(self._run, step, self._collectors)

    async def _evaluate(self, version: int) -> None:
        """Evaluate a version, if it is due: for the step that it trains, the last one for that which is left."""
        with within(step=min(version, self._run.config.steps - 1), lane=f"evaluate.{version}"):
            await evaluate_version(self._run, version)

    def _names(self, version: int) -> list[str]:
        """The flow runs of what begins once the servers are at a version, and of the steps after it."""
        run, steps = self._run, self._run.config.steps
        last = min(version + run.config.rollout.max_staleness + STEPS_AHEAD, steps - 1)
        names = [name_of_step(step) for step in range(version, last + 1) if step not in self._collecting]
        is_evaluated = version <= steps and is_due(run, version)
        return [*names, name_of_evaluation(version)] if is_evaluated else names

    async def evaluated(self, version: int) -> None:
        """Wait for the rest of a version's evaluation."""
        await self._evaluating.pop(version)
