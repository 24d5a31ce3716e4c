"""A step's flow run is made ahead, ends with the run, and never holds it up."""

import asyncio
import contextlib
import time
from typing import Any

import httpx
import patient
import pytest
import yaml
from prefect import flow, get_client, task
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed

from flows.deploying.automations import FILE
from flows.ui.belonging import run_context, run_flow_run
from flows.ui.heartbeats import HEARTBEAT
from flows.ui.step_runs import StepRuns
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
    found = patient.post(f"{api}/flow_runs/filter", json=filters).json()
    state = patient.get(f"{api}/flow_runs/{flow_run}").json()["state_type"]
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


@pytest.mark.service
def test_a_living_run_that_was_called_crashed_is_running_again_and_its_steps_give_signs_of_life(
    prefect_api: str,
) -> None:
    steps: list[str] = []

    @flow(persist_result=False)
    async def called_crashed() -> None:
        async with get_client() as client, StepRuns(PATIENT, "alive") as step_runs:
            run = run_flow_run().id
            await client.set_flow_run_state(run, Crashed(message="nothing was heard of it"), force=True)
            async with step_runs.of("step 0"):
                steps.append(str(step_runs.taken_id("step 0")))
                async with asyncio.timeout(PATIENT.step_run_timeout_s):
                    while (await client.read_flow_run(run)).state_type != StateType.RUNNING:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)

    with temporary_settings({PREFECT_API_URL: prefect_api}):
        asyncio.run(called_crashed())
    sign = heard(prefect_api, steps[0])
    trigger = yaml.safe_load(FILE.read_text())["automations"][0]["trigger"]
    assert EventTrigger.model_validate(trigger).covers(sign)


def heard(api: str, flow_run: str) -> ReceivedEvent:
    """The first sign of life of a flow run."""
    named = {"event": {"name": [HEARTBEAT]}, "resource": {"id": [f"prefect.flow-run.{flow_run}"]}}
    deadline = time.monotonic() + PATIENT.step_run_timeout_s
    while not (found := patient.post(f"{api}/events/filter", json={"filter": named}).json()["events"]):
        assert time.monotonic() < deadline, "no sign of life was recorded"
        time.sleep(0.2)
    return ReceivedEvent.model_validate(found[0])
