"""What a person sees of the fan-out in Prefect, by `observe.task_runs`."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

import patient
import pytest
from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.ui.picture import picture_of
from flows.ui.recording import Recording
from tasks.observe.config import ObserveConfig

pytestmark = pytest.mark.service

TaskRuns = Literal["all", "groups", "events"]


class Part:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def sample(self) -> str:
        if self.error:
            raise self.error
        return "2 trajectories, 0 failed"

    async def score(self) -> str:
        return "2 scores"


@flow(persist_result=False)
async def three_groups(task_runs: TaskRuns, error: bool) -> tuple[str, list[Any], int]:
    """Three groups, the last of which is in two parts, and may fail; returns flow run, results and task runs."""
    recording = Recording(ObserveConfig())
    picture = picture_of(task_runs, recording)

    async def collect(group: int) -> str:
        async def work() -> str:
            failure = ValueError("no prompt") if error and group == 2 else None
            if group == 2:
                await picture.rollout(Part(), 7, group, 0)
                await picture.rollout(Part(failure), 7, group, 1)
            else:
                await picture.rollout(Part(), 7, group)
            return f"{group}: {await picture.score(Part(), 7, group)}"

        return await picture.group(work, 7, group)

    results = await asyncio.gather(*(collect(group) for group in range(3)), return_exceptions=True)
    await recording.wait_until_recorded()
    return flow_run.id, results, recording.n_started


def run(api: str, task_runs: TaskRuns, *, error: bool = False) -> tuple[str, list[Any], int]:
    with temporary_settings({PREFECT_API_URL: api}):
        return asyncio.run(three_groups(task_runs, error))


def found(api: str, flow_run_id: str) -> list[Any]:
    body = {"flow_runs": {"id": {"any_": [flow_run_id]}}}
    return list(patient.post(f"{api}/task_runs/filter", json=body).json())


def task_runs_of(api: str, flow_run_id: str) -> dict[str, str]:
    return {each["name"]: each["state_type"] for each in found(api, flow_run_id)}


def messages_of(api: str, flow_run_id: str) -> set[str]:
    return {each["state"]["message"] for each in found(api, flow_run_id)}


def events_of(api: str, flow_run_id: str, is_enough: Callable[[list[Any]], bool]) -> list[Any]:
    query = {
        "event": {"name": ["rollmill.group.done"]},
        "resource": {"id": [f"prefect.flow-run.{flow_run_id}"]},
    }
    deadline = time.monotonic() + 120
    found: list[Any] = []
    while not is_enough(found) and time.monotonic() < deadline:
        found = patient.post(f"{api}/events/filter", json={"filter": query}).json()["events"]
        time.sleep(0.2)
    return found


def test_every_part_is_a_task_run_named_by_step_group_and_part(prefect_api: str) -> None:
    flow_run_id, results, n_started = run(prefect_api, "all")
    assert results == ["0: 2 scores", "1: 2 scores", "2: 2 scores"]
    shown = task_runs_of(prefect_api, flow_run_id)
    rollouts = {f"step 7 / rollout {group}" for group in ("0", "1", "2.0", "2.1")}
    assert shown.keys() == rollouts | {f"step 7 / score {group}" for group in range(3)}
    assert set(shown.values()) == {"COMPLETED"}
    assert n_started == len(shown)
    assert messages_of(prefect_api, flow_run_id) == {"2 trajectories, 0 failed", "2 scores"}


def test_every_group_is_one_task_run(prefect_api: str) -> None:
    flow_run_id, results, n_started = run(prefect_api, "groups", error=True)
    assert results[:2] == ["0: 2 scores", "1: 2 scores"]
    assert isinstance(results[2], ValueError)
    states = ("COMPLETED", "COMPLETED", "FAILED")
    assert task_runs_of(prefect_api, flow_run_id) == {
        f"step 7 / group {group}": state for group, state in enumerate(states)
    }
    assert n_started == 3
    messages = messages_of(prefect_api, flow_run_id)
    assert "rollout 0: 2 trajectories, 0 failed; score 0: 2 scores" in messages
    assert "Task run encountered an exception ValueError: no prompt" in messages


def test_every_group_is_an_event_that_says_how_its_parts_went_and_no_task_run(prefect_api: str) -> None:
    flow_run_id, results, n_started = run(prefect_api, "events", error=True)
    assert results[:2] == ["0: 2 scores", "1: 2 scores"]
    assert isinstance(results[2], ValueError)
    events = events_of(prefect_api, flow_run_id, lambda found: len(found) == 3)
    told = {each["payload"]["group"]: each["payload"] for each in events}
    assert told[0]["end"] == "done"
    assert told[0]["parts"] == {"rollout 0": "2 trajectories, 0 failed", "score 0": "2 scores"}
    assert told[2]["end"] == "failed: ValueError: no prompt"
    assert told[2]["parts"] == {"rollout 2.0": "2 trajectories, 0 failed"}
    assert {each["step"] for each in told.values()} == {7}
    assert (task_runs_of(prefect_api, flow_run_id), n_started) == ({}, 0)
