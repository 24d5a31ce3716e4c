"""A step's flow run is made ahead, ends with the run, and never holds it up."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.belonging import run_context, run_flow_run
from flows.step_runs import StepRuns
from tasks.observe.config import ObserveConfig

PATIENT = ObserveConfig(step_run_timeout_s=60.0, exit_timeout_s=30.0)


@task
async def rollout() -> str:
    return str(run_flow_run().id)


def ended(api: str, error: type[BaseException] | None) -> tuple[str, dict[str, str]]:
    """The state of a run of two steps, the second of which may fail, and the steps' states, once it is over."""
    told: list[str] = []

    @flow(persist_result=False)
    async def two_steps() -> None:
        told.append(str(run_flow_run().id))
        async with StepRuns(PATIENT, "two", told.append) as step_runs:
            step_runs.expect(["step 0", "step 1", "step 2"])
            async with step_runs.of("step 0"):
                assert await rollout() == told[0]
            async with step_runs.of("step 1"):
                await rollout()
                if error:
                    raise error

    with (
        temporary_settings({PREFECT_API_URL: api}),
        contextlib.suppress(asyncio.CancelledError, TerminationSignal, OSError),
    ):
        asyncio.run(two_steps())
    (flow_run,) = told
    filters: dict[str, Any] = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run]}}}
    found = httpx.post(f"{api}/flow_runs/filter", json=filters).json()
    state = httpx.get(f"{api}/flow_runs/{flow_run}").json()["state_type"]
    assert all(each["tags"] == ["two"] for each in found)
    return state, {each["name"]: each["state_type"] for each in found}


@pytest.mark.service
@pytest.mark.parametrize(
    ("error", "state"), [(None, "COMPLETED"), (OSError, "FAILED"), (asyncio.CancelledError, "CRASHED")]
)
def test_steps_end_as_the_run_does_and_what_was_never_begun_is_gone(
    prefect_api: str, error: type[BaseException] | None, state: str
) -> None:
    assert ended(prefect_api, error) == (state, {"two / step 0": "COMPLETED", "two / step 1": state})


class Gone(StepRuns):
    """Whose server takes nothing."""

    async def _make(self, name: str, made: "asyncio.Future[FlowRun | None]", client: PrefectClient) -> None:
        made.set_result(None)
        raise httpx.ConnectError("connection refused")


@pytest.mark.service
def test_a_server_that_takes_no_flow_runs_is_told_of_once_and_the_run_goes_on(prefect_api: str) -> None:
    told: list[str] = []

    @flow(persist_result=False)
    async def without_server() -> None:
        config = ObserveConfig(step_run_timeout_s=3600.0, exit_timeout_s=0.0)
        async with Gone(config, "gone", told.append) as step_runs:
            for number in range(2):
                async with step_runs.of(f"step {number}"):
                    assert FlowRunContext.get() is run_context()

    with temporary_settings({PREFECT_API_URL: prefect_api}):
        asyncio.run(without_server())
    (line,) = told
    assert "ConnectError: connection refused" in line
