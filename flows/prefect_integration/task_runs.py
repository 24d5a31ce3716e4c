"""What Prefect records of a step's groups: a task run for each rollout and score, one for each group, or events."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.states import Completed

from rollmill.flows.prefect_integration.recording import Recording
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.observe.loop_yield import yield_to_loop
from rollmill.tasks.rollout.task import rollout
from rollmill.tasks.score.task import score

RunTask: TypeAlias = Callable[..., Awaitable[State[Any]]]
"""Runs a task with its arguments and `wait_for`, the states of the task runs that it follows. Returns the state in which the
task ended; `await state.aresult()` gives the result, or raises what the task raised."""


async def start_prefect_thread() -> None:
    """Start Prefect's thread for resolving `wait_for` now, from an executor's thread.

    Otherwise the first resolved state would start it, which takes 0.1 s and blocks the event loop.
    """
    # An executor's thread has no flow's context, in which `result` would return a coroutine.
    await asyncio.get_running_loop().run_in_executor(None, Completed(data=True).result)


class TaskRunRecorder:
    """Runs the rollout and score tasks of a step's groups, as Prefect task runs if `observe.task_runs` is `all`.

    Args:
        config: which task runs there are, and their tags.
        recording: counts the task runs.

    Attributes:
        rollout: runs the rollout task; `count_task_run` comes before.
        score: runs the score task; `count_task_run` comes before.
        records_steps: True if each step is a task run, in which those of its groups are.
    """

    records_steps = True

    def __init__(self, config: ObserveConfig, recording: Recording) -> None:
        self._kind, self._recording = config.task_runs, recording
        self.rollout = self._choose(rollout, config.rollout_tags)
        self.score = self._choose(score, config.score_tags)

    def _choose(self, task: Task[..., Coroutine[Any, Any, State[Any]]], tags: Sequence[str]) -> RunTask:
        """Return a function that calls a task as a Prefect task run, or its plain function unless each task is a task run."""
        if self._kind != "all":
            return partial(_call_function, task)
        # A tag costs a request to the server at the start of each task run, which is why there are none by default.
        return partial(task.with_options(tags=tags), return_state=True)

    async def count_task_run(self) -> None:
        """Count a task run that `rollout` or `score` is about to start, if these are task runs."""
        if self._kind == "all":
            await self._count()

    async def _count(self) -> None:
        # Prefect's work at the start of a task run blocks the event loop: others run in between.
        await yield_to_loop()
        self._recording.count_start()

    @asynccontextmanager
    async def watch_group(self, step: int, group: int, summaries: Mapping[str, str]) -> AsyncIterator[None]:
        """Record a group in Prefect while it is collected: as a task run, as an event when it ends, or not at all.

        Args:
            step: the step.
            group: number of the group.
            summaries: how each of its tasks ended, by "rollout 384" or "score 384"; filled meanwhile.
        """
        match self._kind:
            case "all":
                yield
            case "groups":
                await self._count()
                async with _group_task_run(step, group, summaries):
                    yield
            case "events":
                async with _group_event(step, group, summaries):
                    yield


async def _call_function(task: Task[..., Any], *arguments: object, wait_for: object = ()) -> State[Any]:
    state: State[Any] = await task.fn(*arguments)
    return state


@task(
    name="group",
    task_run_name="step {step} / group {group}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
async def record_group(end: Awaitable[str], step: int, group: int) -> State[None]:
    """Run as the Prefect task run of a group until `end` is done; return the state Completed with its text as message."""
    return Completed(message=await end)


@asynccontextmanager
async def _group_task_run(step: int, group: int, summaries: Mapping[str, str]) -> AsyncIterator[None]:
    end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    recording = asyncio.ensure_future(record_group(end, step, group))
    try:
        yield
        end.set_result("; ".join(f"{task}: {summary}" for task, summary in summaries.items()))
        await recording
    except Exception as error:
        end.set_exception(error)
        with suppress(type(error)):
            await recording
        raise
    finally:
        recording.cancel()
        await asyncio.wait([recording])


@asynccontextmanager
async def _group_event(step: int, group: int, summaries: Mapping[str, str]) -> AsyncIterator[None]:
    started, end = time.perf_counter(), "cancelled"
    try:
        yield
        end = "done"
    except Exception as error:
        end = f"failed: {type(error).__name__}: {error}"
        raise
    finally:
        seconds = round(time.perf_counter() - started, 3)
        emit_event(
            event="rollmill.group.done",
            resource={
                "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
                "prefect.resource.name": flow_run.name or "",
            },
            payload={"step": step, "group": group, "end": end, "seconds": seconds, "tasks": {**summaries}},
        )
