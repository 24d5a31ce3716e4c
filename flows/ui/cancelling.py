"""What Prefect shows of a run that was cancelled: what ended with it is Cancelled too, not crashed or going on."""

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect import Flow, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.states import Cancelled

from flows.ui.leftovers import MESSAGE as KILLED
from flows.ui.leftovers import unfinished_steps

MESSAGE = "Cancelled with its run."
OPEN = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
PAGE = 200
AT_ONCE = 8
"""Requests to the server side by side."""


async def mark_cancelled(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Mark the flow runs of steps and the task runs that a cancelled flow run took with it.

    A hook, which the worker calls when the run's process is gone; what that process told a slow server may be taken later.
    """
    async with get_client() as client:
        for step in await unfinished_steps(client, flow_run.id):
            await client.set_flow_run_state(step.id, Cancelled(message=MESSAGE), force=True)
        began = await _began(client, flow_run.id)
        cut = [each for each in await _open_or_crashed(client, flow_run.id) if _is_cut(each, began)]
        for begin in range(0, len(cut), AT_ONCE):
            await asyncio.gather(*(_mark(client, each) for each in cut[begin : begin + AT_ONCE]))


async def _mark(client: PrefectClient, task_run: TaskRun) -> None:
    await client.set_task_run_state(task_run.id, Cancelled(message=MESSAGE), force=True)


async def _began(client: PrefectClient, flow_run_id: UUID) -> datetime:
    """When the attempt began that was cancelled, by the clock of the machine it ran on."""
    states = await client.read_flow_run_states(flow_run_id)
    return max(
        (each.timestamp for each in states if each.is_running()), default=datetime.max.replace(tzinfo=UTC)
    )


async def _open_or_crashed(client: PrefectClient, flow_run_id: UUID) -> list[TaskRun]:
    """Those of a flow run, and of the flow runs of its steps."""
    ids = {"any_": [str(flow_run_id)]}
    of_run = FlowRunFilter.model_validate({"operator": "or_", "id": ids, "parent_flow_run_id": ids})
    unfinished = TaskRunFilter.model_validate({"state": {"type": {"any_": [*OPEN, StateType.CRASHED]}}})
    found: list[TaskRun] = []
    while True:
        page = await client.read_task_runs(
            flow_run_filter=of_run, task_run_filter=unfinished, limit=PAGE, offset=len(found)
        )
        found += page
        if len(page) < PAGE:
            return found


def _is_cut(task_run: TaskRun, began: datetime) -> bool:
    """True for one that is open, or that Prefect calls crashed in the attempt; the dead of earlier ones stay crashed."""
    state = task_run.state
    if state is None or state.message == KILLED:
        return False
    return task_run.state_type in OPEN or state.timestamp >= began
