"""Task runs that ended without Prefect learning how: those of killed attempts become Crashed, those of cancelled ones Cancelled."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect import Flow, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from rollmill.flows.failure import PREFECT_ERRORS
from rollmill.flows.prefect_integration.flow_run import current_flow_run, in_flow_run
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.store.filesystem import Files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.flow_runs import read_flow_runs, write_flow_runs

UNFINISHED = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
KILLED = "Its process was killed; this was noticed when the run was started again."
CANCELLED = "Cancelled with its run."
PAGE = 200
AT_ONCE = 8
"""Concurrent requests to the server."""


# A start must not wait long for what only tidies up.
TIMEOUT_S = 30.0


async def mark_leftovers(folder: RunFolder, files: Files, timeout_s: float = TIMEOUT_S) -> None:
    """Mark the unfinished flow and task runs of earlier attempts at a run as Crashed in Prefect, and store this flow run's id.

    The caller holds the run's lock, so that no earlier attempt can be alive. What Prefect refuses, or does not do within
    `timeout_s` seconds, is logged and tried again at the next start; it never fails the run. `files` are the lock holder's.

    Raises:
        StoreError: the folder's note of flow runs cannot be read or written.
    """
    ours = current_flow_run()
    earlier = [each for each in await asyncio.to_thread(read_flow_runs, folder) if each != ours.id]
    await asyncio.to_thread(write_flow_runs, files, [*earlier, ours.id])
    ended: list[UUID] = []
    try:
        async with asyncio.timeout(timeout_s), get_client() as client:
            if ours.state:
                # A Retry, or a Resume, runs in the flow run of the attempt before.
                await _mark_crashed(client, ours.id, before=ours.state.timestamp)
            for each in earlier:
                await _mark_flow_run(client, each)
                ended.append(each)
    except PREFECT_ERRORS as error:
        say(
            f"some unfinished runs of earlier attempts could not be marked as Crashed in Prefect: {type(error).__name__}: {error}"
        )
    if ended:
        left = [each for each in earlier if each not in ended]
        await asyncio.to_thread(write_flow_runs, files, [*left, ours.id])


async def mark_cancelled(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Mark as Cancelled the task runs that a cancel ended, which Prefect shows as Crashed or unfinished.

    It is a hook: Prefect's worker calls it when the flow run's process has ended. A slow Prefect server may record task runs of
    that process only later; they stay Running until the run is started again.
    """
    async with get_client() as client:
        began = await _find_last_start(client, flow_run.id)
        found = await _read_task_runs(client, flow_run.id, [*UNFINISHED, StateType.CRASHED])
        await _set_states(
            client, [each for each in found if _is_cancelled(each, began)], Cancelled(message=CANCELLED)
        )


async def _mark_flow_run(client: PrefectClient, flow_run_id: UUID) -> None:
    """Mark a flow run and its task runs as Crashed if they are unfinished; does nothing if the server does not know it."""
    try:
        flow_run = await client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        return
    await _mark_crashed(client, flow_run_id)
    if flow_run.state_type in UNFINISHED:
        await client.set_flow_run_state(flow_run_id, Crashed(message=KILLED), force=True)


async def _mark_crashed(client: PrefectClient, flow_run_id: UUID, before: datetime | None = None) -> None:
    """Mark a flow run's unfinished task runs as Crashed; if `before` is given, only those in their state since before then."""
    found = await _read_task_runs(client, flow_run_id, UNFINISHED)
    old = [each for each in found if each.state and (before is None or each.state.timestamp < before)]
    await _set_states(client, old, Crashed(message=KILLED))


async def _read_task_runs(
    client: PrefectClient, flow_run_id: UUID, states: Sequence[StateType]
) -> list[TaskRun]:
    """Return all task runs of a flow run that are in one of these states."""
    found: list[TaskRun] = []
    while True:
        page = await client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate(in_flow_run(flow_run_id)),
            task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": list(states)}}}),
            limit=PAGE,
            offset=len(found),
        )
        found += page
        if len(page) < PAGE:
            return found


async def _set_states(client: PrefectClient, task_runs: Sequence[TaskRun], state: State[Any]) -> None:
    # force: the server would refuse to move a task run that it has as Crashed to another final state.
    for begin in range(0, len(task_runs), AT_ONCE):
        some = task_runs[begin : begin + AT_ONCE]
        await asyncio.gather(*(client.set_task_run_state(each.id, state, force=True) for each in some))


async def _find_last_start(client: PrefectClient, flow_run_id: UUID) -> datetime:
    """Return when the last attempt at a flow run began, by the clock of the machine it ran on.

    The largest possible time if no attempt has begun.
    """
    states = await client.read_flow_run_states(flow_run_id)
    return max(
        (each.timestamp for each in states if each.is_running()), default=datetime.max.replace(tzinfo=UTC)
    )


def _is_cancelled(task_run: TaskRun, began: datetime) -> bool:
    """Return True if a task run is unfinished, or crashed at or after `began`, the start of the flow run's last attempt.

    False for task runs of killed attempts, which stay Crashed.
    """
    state = task_run.state
    if state is None or state.message == KILLED:
        return False
    return task_run.state_type in UNFINISHED or state.timestamp >= began
