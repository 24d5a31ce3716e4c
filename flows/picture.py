"""What Prefect records of the fan-out: a task run for each part of a group, for each group, or events alone."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, Protocol, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.runtime import flow_run

from flows.recording import Recording
from tasks.rollout.task import SampledPart, rollout
from tasks.score.task import ScoredPart, score

T = TypeVar("T")


class Picture(Protocol):
    """Runs the parts of a group, and their group, so that people can watch them in Prefect's UI."""

    async def rollout(self, part: SampledPart, step: int, group: int, number: int | None = None) -> str:
        """Sample a part of a group; returns how it went.

        Args:
            part: what is sampled.
            step: the step whose data it is.
            group: number of the group.
            number: which part of the group it is; None when the group is one part.
        """

    async def score(self, part: ScoredPart, step: int, group: int, number: int | None = None) -> str:
        """Score a part of a group; arguments and result as for `rollout`."""

    async def group(self, work: Callable[[], Awaitable[T]], step: int, group: int) -> T:
        """Do all of a group's work, which calls `rollout` and `score` for its parts.

        Holds it back first while Prefect's server is too far behind with recording.
        """


def picture_of(task_runs: Literal["all", "groups", "events"], recording: Recording) -> Picture:
    """The picture that `observe.task_runs` asks for; every task run it starts is counted by `recording`."""
    match task_runs:
        case "all":
            return PartPicture(recording)
        case "groups":
            return GroupPicture(recording)
        case "events":
            return EventPicture()


class PartPicture:
    """A task run for every part that is sampled and for every part that is scored."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    async def rollout(self, part: SampledPart, step: int, group: int, number: int | None = None) -> str:
        self._recording.started()
        return await rollout(part, step, _label(group, number))

    async def score(self, part: ScoredPart, step: int, group: int, number: int | None = None) -> str:
        self._recording.started()
        return await score(part, step, _label(group, number))

    async def group(self, work: Callable[[], Awaitable[T]], step: int, group: int) -> T:
        await self._recording.hold_back()
        return await work()


class GroupPicture:
    """A task run for every group."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    async def rollout(self, part: SampledPart, step: int, group: int, number: int | None = None) -> str:
        return await part.sample()

    async def score(self, part: ScoredPart, step: int, group: int, number: int | None = None) -> str:
        return await part.score()

    async def group(self, work: Callable[[], Awaitable[T]], step: int, group: int) -> T:
        kept = _Kept(work)
        await self._recording.hold_back()
        self._recording.started()
        await group_run(kept, step, group)
        return kept.result


class EventPicture:
    """No task runs; an event for every group that is over, which says how it went and how long it took."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[str, str]] = {}

    async def rollout(self, part: SampledPart, step: int, group: int, number: int | None = None) -> str:
        return self._told(step, group, f"rollout {_label(group, number)}", await part.sample())

    async def score(self, part: ScoredPart, step: int, group: int, number: int | None = None) -> str:
        return self._told(step, group, f"score {_label(group, number)}", await part.score())

    async def group(self, work: Callable[[], Awaitable[T]], step: int, group: int) -> T:
        started = time.perf_counter()
        parts = self._parts[step, group] = {}
        end = "cut"
        try:
            result = await work()
            end = "done"
            return result
        except Exception as error:
            end = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            del self._parts[step, group]
            seconds = round(time.perf_counter() - started, 3)
            _emit_group(step, group, {"end": end, "seconds": seconds, "parts": parts})

    def _told(self, step: int, group: int, part: str, how: str) -> str:
        self._parts.get((step, group), {})[part] = how
        return how


class _Kept(Generic[T]):
    """Work and its result: Prefect keeps what a task returns as long as its flow runs, so nothing is returned."""

    __slots__ = ("result", "work")

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self.work = work

    async def do(self) -> None:
        self.result = await self.work()


@task(name="group", task_run_name="step {step} / group {group}", cache_policy=NO_CACHE, persist_result=False)
async def group_run(kept: _Kept[Any], step: int, group: int) -> None:
    """Sample and score a group; what comes of it stays in `kept`."""
    await kept.do()


def _label(group: int, number: int | None) -> str:
    return str(group) if number is None else f"{group}.{number}"


def _emit_group(step: int, group: int, payload: dict[str, object]) -> None:
    emit_event(
        event="rollmill.group.done",
        resource={
            "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
            "prefect.resource.name": flow_run.name or "",
        },
        payload={"step": step, "group": group} | payload,
    )
