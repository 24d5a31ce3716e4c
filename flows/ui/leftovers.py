"""What a killed attempt leaves in Prefect: a flow run and task runs that seem to run for ever."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from datetime import datetime
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, StateType, TaskRun
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from flows.failure import PREFECT_ERRORS, one_error
from flows.ui.belonging import own_and_steps, run_flow_run
from flows.ui.progress import say
from tasks.store.filesystem import Files
from tasks.store.flow_runs import read_flow_runs, write_flow_runs
from tasks.store.layout import RunFolder

UNFINISHED = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
MESSAGE = "Its process was killed; this was noticed when the run was started again."
PAGE = 200
AT_ONCE = 8
"""Requests to the server side by side."""


async def mark_leftovers(folder: RunFolder, files: Files, timeout_s: float) -> None:
    """Mark what earlier attempts at a run left unfinished in Prefect as Crashed, and note this flow run.

    Called by whoever holds the run's lock, so that no earlier attempt can be alive. What Prefect refuses, or does
    not do in `timeout_s` seconds, is said, kept in mind for the next start, and never fails the run. `files` are those
    of the lock's holder.

    Raises:
        StoreError: the folder's note of flow runs cannot be read or written.
    """
    ours = run_flow_run()
    earlier = [each for each in await asyncio.to_thread(read_flow_runs, folder) if each != ours.id]
    await asyncio.to_thread(write_flow_runs, files, [*earlier, ours.id])
    ended: list[UUID] = []
    try:
        async with asyncio.timeout(timeout_s), get_client() as client:
            if ours.run_count > 1 and ours.state:
                await _mark_below(client, ours.id, before=ours.state.timestamp)
            for each in earlier:
                await _mark_flow_run(client, each)
                ended.append(each)
    except PREFECT_ERRORS as error:
        say(
            f"what earlier attempts left in Prefect is not all marked as crashed: {type(error).__name__}: {error}"
        )
    if ended:
        left = [each for each in earlier if each not in ended]
        await asyncio.to_thread(write_flow_runs, files, [*left, ours.id])


async def _mark_flow_run(client: PrefectClient, flow_run_id: UUID) -> None:
    """Mark a flow run that is over, and its task runs; one that this server does not know has left nothing."""
    try:
        flow_run = await client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        return
    await _mark_below(client, flow_run_id)
    if flow_run.state_type in UNFINISHED:
        await client.set_flow_run_state(flow_run_id, Crashed(message=MESSAGE), force=True)


async def _mark_below(client: PrefectClient, flow_run_id: UUID, before: datetime | None = None) -> None:
    """Mark the unfinished flow runs of a run's steps, and its and their unfinished task runs; or those from before a time."""

    def leftover(found: Sequence[FlowRun | TaskRun]) -> list[UUID]:
        states = {each.id: each.state for each in found}
        return [
            each for each, state in states.items() if state and (before is None or state.timestamp < before)
        ]

    steps = leftover(await unfinished_steps(client, flow_run_id))
    await _side_by_side(
        client.set_flow_run_state(each, Crashed(message=MESSAGE), force=True) for each in steps
    )
    task_runs = leftover(await _unfinished_task_runs(client, flow_run_id))
    await _side_by_side(
        client.set_task_run_state(each, Crashed(message=MESSAGE), force=True) for each in task_runs
    )


async def unfinished_steps(client: PrefectClient, flow_run_id: UUID) -> list[FlowRun]:
    """The first unfinished flow runs of a run's steps: never more than a few are open."""
    unfinished = {"parent_flow_run_id": {"any_": [flow_run_id]}, "state": {"type": {"any_": UNFINISHED}}}
    return await client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(unfinished), limit=PAGE)


async def _unfinished_task_runs(client: PrefectClient, flow_run_id: UUID) -> list[TaskRun]:
    found: list[TaskRun] = []
    while True:
        page = await client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate(own_and_steps(flow_run_id)),
            task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": UNFINISHED}}}),
            limit=PAGE,
            offset=len(found),
        )
        found += page
        if len(page) < PAGE:
            return found


async def _side_by_side(requests: Iterable[Awaitable[object]]) -> None:
    """Make requests, `AT_ONCE` at a time; the first error ends it."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            await request

    with one_error():
        async with asyncio.TaskGroup() as workers:
            for _ in range(AT_ONCE):
                workers.create_task(work())
