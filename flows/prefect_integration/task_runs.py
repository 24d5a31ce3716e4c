"""What Prefect records of a step's groups: a task run for each rollout and score, one for each group, or events."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.states import Completed

from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.prefect_integration.recording import Recording
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.observe.loop_yield import yield_to_loop
from rollmill.tasks.rollout.task import RolloutWork, SampledChunk, rollout
from rollmill.tasks.score.task import ScoredChunk, ScoreWork, score

Result = TypeVar("Result")
RecordedTask: TypeAlias = Task[..., Coroutine[Any, Any, State[Any]]]


class RecordedWork(Generic[Result]):
    """Work of a step, and the Prefect task run that shows it, which begins and ends a moment later; an async context manager.

    Prefect spends some 3 ms of CPU at the start of a task run and 2 ms at its end. Neither the work nor what follows it waits for that.

    Example: async with recorder.rollout(chunk, 12, "384") as rolled: sampled = rolled.done(await rolled.work())

    Args:
        work: does the work.
        recording: the task run; None: there is none.
        ended: future that the task run waits for; None: it does the work itself.
        is_joined: True if the end of the block waits for the end of the task run.

    Attributes:
        work: see Args.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[Result]],
        recording: asyncio.Task[Any] | None = None,
        ended: asyncio.Future[Result] | None = None,
        *,
        is_joined: bool = False,
    ) -> None:
        self.work, self._recording, self._ended, self._is_joined = work, recording, ended, is_joined
        self._result: Result | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            if self._is_joined and self._recording is not None:
                await self._recording
            return
        if self._ended is not None and not self._ended.done():
            if isinstance(error, Exception):
                self._ended.set_exception(error)
            else:
                self._ended.cancel()
        await self.recorded()

    def done(self, result: Result) -> Result:
        """Take the result of the work, with which the task run ends; returns it."""
        self._result = result
        # A task run that was cancelled has cancelled what it waited for.
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(result)
        return result

    async def recorded(self) -> None:
        """Wait until the task run has ended, if there is one."""
        if self._recording is not None:
            await asyncio.wait([self._recording])

    @property
    def result(self) -> Result | None:
        """The result of work that is done; a task run that has it in `wait_for` gets an edge from this one's."""
        return self._result


class BegunWork:
    """Work of a task run that has begun: the task run waits for its end."""

    # Not a dataclass: Prefect searches the fields of dataclasses among a task's parameters.
    __slots__ = ("_ended",)

    def __init__(self, ended: asyncio.Future[Any]) -> None:
        self._ended = ended

    async def sample(self) -> SampledChunk:
        """Wait for the rollouts, and return them."""
        sampled: SampledChunk = await self._ended
        return sampled

    async def score(self) -> ScoredChunk:
        """Wait for the scores, and return them."""
        scored: ScoredChunk = await self._ended
        return scored


MOST_GROUPS = 2000
"""Groups of a step above which they are events: a server of Prefect records some 150 task runs a second and core."""


def choose_task_runs(
    config: ObserveConfig, groups_per_step: int, warn: Callable[[str], None] = say
) -> ObserveConfig:
    """Return settings with `observe.task_runs` `events` if a step has more than MOST_GROUPS groups, and warn of it."""
    if config.task_runs == "events" or groups_per_step <= MOST_GROUPS:
        return config
    warn(
        f"rollout.groups_per_step is {groups_per_step}, above {MOST_GROUPS}: Prefect gets an event for each group, and no task "
        "runs (observe.task_runs events)"
    )
    return config.model_copy(update={"task_runs": "events"})


class TaskRunRecorder:
    """Shows the rollouts and scores of a step's groups in Prefect, each as a task run if `observe.task_runs` is `all`.

    Args:
        config: which task runs there are, and their tags.
        recording: counts the task runs.

    Attributes:
        records_steps: True if each step is a task run, in which those of its groups are.
    """

    records_steps = True

    def __init__(self, config: ObserveConfig, recording: Recording) -> None:
        self._kind, self._recording = config.task_runs, recording
        self._rollout = rollout.with_options(tags=config.rollout_tags)
        self._score = score.with_options(tags=config.score_tags)

    def rollout(
        self, chunk: RolloutWork, step: int, label: str, recordings: asyncio.TaskGroup | None = None
    ) -> RecordedWork[SampledChunk]:
        """Return the rollouts of a chunk as work that is to be done.

        Args:
            chunk: the rollouts.
            step: the step.
            label: as of the task `rollout`.
            recordings: waits for the end of the task run; None: the block of the work does.
        """
        return self._begin(self._rollout, chunk, chunk.sample, (step, label), (), recordings)

    def score(
        self,
        chunk: ScoreWork,
        step: int,
        label: str,
        recordings: asyncio.TaskGroup | None = None,
        after: Sequence[RecordedWork[Any]] = (),
    ) -> RecordedWork[ScoredChunk]:
        """Return the scores of a chunk, as `rollout`; the task run follows those of `after`, which are done."""
        return self._begin(self._score, chunk, chunk.score, (step, label), after, recordings)

    def _begin(
        self,
        task: RecordedTask,
        chunk: object,
        work: Callable[[], Coroutine[Any, Any, Result]],
        name: tuple[int, str],
        after: Sequence[RecordedWork[Any]],
        recordings: asyncio.TaskGroup | None,
    ) -> RecordedWork[Result]:
        if self._kind != "all":
            return RecordedWork(work)
        is_joined, record = recordings is None, (recordings or asyncio).create_task
        if task.tags:
            # A concurrency limit of a tag must hold the work back, so the task run does it.
            recording = record(self._run(task, chunk, name, after))
            return RecordedWork(partial(_wait_for_result, recording), recording, is_joined=is_joined)
        ended: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        recording = record(self._run(task, BegunWork(ended), name, after))
        return RecordedWork(work, recording, ended, is_joined=is_joined)

    async def _run(
        self, task: RecordedTask, chunk: object, name: tuple[int, str], after: Sequence[RecordedWork[Any]]
    ) -> State[Any]:
        for each in after:
            await each.recorded()
        await self._count()
        # Their results and not their states, which Prefect would resolve in another thread.
        earlier = [each.result for each in after]
        state: State[Any] = await task(chunk, *name, wait_for=earlier, return_state=True)
        return state

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


async def _wait_for_result(recording: asyncio.Task[State[Any]]) -> Any:
    return await (await recording).aresult()


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
