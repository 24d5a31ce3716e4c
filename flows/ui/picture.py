"""What Prefect records of the fan-out: a task run for each part of a group, for each group, or events alone."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, Protocol, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.runtime import flow_run

from flows.ui.recording import Recording
from flows.ui.turns import SampledInTurn, SampledPart, ScoredInTurn, ScoredPart, Turns
from tasks.observe.spans import span
from tasks.rollout.task import rollout
from tasks.score.task import score

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
        self._recording, self._turns = recording, Turns()

    async def rollout(self, part: SampledPart, step: int, group: int, number: int | None = None) -> str:
        with span("recording"):
            await self._turns.next()
            self._recording.started()
            return (
                await rollout(SampledInTurn(part, self._turns), step, _label(group, number))
            ).message or ""

    async def score(self, part: ScoredPart, step: int, group: int, number: int | None = None) -> str:
        with span("recording"):
            await self._turns.next()
            self._recording.started()
            return (await score(ScoredInTurn(part, self._turns), step, _label(group, number))).message or ""

    async def group(self, work: Callable[[], Awaitable[T]], step: int, group: int) -> T:
        await self._recording.hold_back()
        return await work()


class GroupPicture:
    """A task run for every group."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._turns, self._notes = recording, Turns(), _Notes()

    async def rollout(self, part: SampledPart, step: int, group: int, number: int | None = None) -> str:
        return self._notes.add(step, group, f"rollout {_label(group, number)}", await part.sample())

    async def score(self, part: ScoredPart, step: int, group: int, number: int | None = None) -> str:
        return self._notes.add(step, group, f"score {_label(group, number)}", await part.score())

    async def group(self, work: Callable[[], Awaitable[T]], step: int, group: int) -> T:
        await self._recording.hold_back()
        with span("recording"), self._notes.of(step, group) as notes:
            await self._turns.next()
            self._recording.started()
            group_work = _GroupWork(work, self._turns, notes)
            await group_run(group_work, step, group)
        return group_work.result


class EventPicture:
    """No task runs; an event for every group that is over, which says how it went and how long it took."""

    def __init__(self) -> None:
        self._notes = _Notes()

    async def rollout(self, part: SampledPart, step: int, group: int, number: int | None = None) -> str:
        return self._notes.add(step, group, f"rollout {_label(group, number)}", await part.sample())

    async def score(self, part: ScoredPart, step: int, group: int, number: int | None = None) -> str:
        return self._notes.add(step, group, f"score {_label(group, number)}", await part.score())

    async def group(self, work: Callable[[], Awaitable[T]], step: int, group: int) -> T:
        started = time.perf_counter()
        end = "cut"
        with self._notes.of(step, group) as notes:
            try:
                result = await work()
                end = "done"
                return result
            except Exception as error:
                end = f"failed: {type(error).__name__}: {error}"
                raise
            finally:
                seconds = round(time.perf_counter() - started, 3)
                _emit_group(step, group, {"end": end, "seconds": seconds, "parts": notes})


class _Notes:
    """How the parts of a group went, in words, by part, while the group is worked on."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[str, str]] = {}

    @contextmanager
    def of(self, step: int, group: int) -> Iterator[dict[str, str]]:
        """The notes of a group, which are filled meanwhile."""
        parts = self._parts[step, group] = {}
        try:
            yield parts
        finally:
            del self._parts[step, group]

    def add(self, step: int, group: int, part: str, how: str) -> str:
        """Note how a part went; returns that."""
        self._parts.get((step, group), {})[part] = how
        return how


class _GroupWork(Generic[T]):
    """A group's work, whose task run ends in its turn; what comes of it stays here."""

    __slots__ = ("_notes", "_turns", "_work", "result")

    def __init__(self, work: Callable[[], Awaitable[T]], turns: Turns, notes: dict[str, str]) -> None:
        self._work, self._turns, self._notes = work, turns, notes

    async def do(self) -> State[object]:
        """Do it; returns the state in which its task run ends."""
        with span("collecting"):
            self.result = await self._work()
        return await self._turns.done("; ".join(f"{part}: {how}" for part, how in self._notes.items()))


@task(name="group", task_run_name="step {step} / group {group}", cache_policy=NO_CACHE, persist_result=False)
async def group_run(work: _GroupWork[Any], step: int, group: int) -> State[object]:
    """Sample and score a group; what comes of it stays in `work`."""
    return await work.do()


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
