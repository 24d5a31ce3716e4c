"""What Prefect records of a step's groups, by `observe.task_runs`."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from uuid import uuid4

import patient
import pytest
from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.prefect_integration.task_runs import MOST_GROUPS, TaskRunRecorder, choose_task_runs
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.rollout.task import SampledChunk
from rollmill.tasks.score.task import ScoredChunk
from rollmill.tasks.store.rows import no_rows

pytestmark = pytest.mark.service

TaskRuns = Literal["all", "groups", "events"]


class Sampled(SampledChunk):
    summary = "2 complete"


class Scored(ScoredChunk):
    summary = "2 scores"


class Chunk:
    """Two trajectories, or an error; counts how many are sampled at the same time."""

    n_running, most_running = 0, 0

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def sample(self) -> SampledChunk:
        Chunk.n_running += 1
        Chunk.most_running = max(Chunk.most_running, Chunk.n_running)
        # Long enough for others to begin.
        await asyncio.sleep(0.2)
        Chunk.n_running -= 1
        if self.error:
            raise self.error
        return Sampled(no_rows("rollouts"), ())

    async def score(self) -> ScoredChunk:
        return Scored(no_rows("scores"))


class Group:
    """A group of two chunks, the second of which may fail, or of one."""

    def __init__(self, recorder: TaskRunRecorder, number: int, error: Exception | None) -> None:
        self.recorder, self.number, self.error = recorder, number, error
        self.summaries: dict[str, str] = {}

    async def collect(self) -> None:
        chunks = [Chunk(), Chunk(self.error)] if self.number == 2 else [Chunk()]
        for number, chunk in enumerate(chunks):
            label = f"{self.number}.{number}" if len(chunks) > 1 else str(self.number)
            async with self.recorder.rollout(chunk, 7, label) as rolled:
                self.summaries[f"rollout {label}"] = rolled.done(await rolled.work()).summary
        async with self.recorder.score(chunk, 7, str(self.number), after=[rolled]) as scored:
            self.summaries[f"score {self.number}"] = scored.done(await scored.work()).summary


@flow(persist_result=False)
async def three_groups(
    task_runs: TaskRuns, error: bool, tags: tuple[str, str] | None = None
) -> tuple[str, list[Any], int]:
    """Three groups, the last of which may fail; returns flow run, errors and the number of task runs."""
    config = ObserveConfig(task_runs=task_runs)
    if tags is not None:
        config = ObserveConfig(task_runs=task_runs, rollout_tags=tags[:1], score_tags=tags[1:])
    recording = Recording()
    recorder = TaskRunRecorder(config, recording)

    async def collect(number: int) -> None:
        group = Group(recorder, number, ValueError("no prompt") if error else None)
        async with recorder.watch_group(7, number, group.summaries):
            await group.collect()

    errors = await asyncio.gather(*(collect(group) for group in range(3)), return_exceptions=True)
    await recording.wait_until_recorded()
    return flow_run.id, errors, recording.n_started


def run(
    api: str, task_runs: TaskRuns, *, error: bool = False, tags: tuple[str, str] | None = None
) -> tuple[str, list[Any], int]:
    with temporary_settings({PREFECT_API_URL: api}):
        return asyncio.run(three_groups(task_runs, error, tags))


def found(api: str, flow_run_id: str) -> list[Any]:
    body = {"flow_runs": {"id": {"any_": [flow_run_id]}}}
    return list(patient.post(f"{api}/task_runs/filter", json=body).json())


def states(api: str, flow_run_id: str) -> dict[str, str]:
    return {each["name"]: each["state_type"] for each in found(api, flow_run_id)}


def messages(api: str, flow_run_id: str) -> set[str]:
    return {each["state"]["message"] for each in found(api, flow_run_id)}


def edges(api: str, flow_run_id: str) -> dict[str, set[str]]:
    """What each node of the graph follows, by names."""
    nodes: Mapping[str, Any] = dict(patient.get(f"{api}/flow_runs/{flow_run_id}/graph-v2").json()["nodes"])
    return {
        node["label"]: {nodes[edge["id"]]["label"] for edge in node["parents"]} for node in nodes.values()
    }


def events(api: str, flow_run_id: str, is_enough: Callable[[list[Any]], bool]) -> list[Any]:
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


def test_every_rollout_and_score_is_a_task_run_and_a_score_follows_its_rollout(prefect_api: str) -> None:
    flow_run_id, errors, n_started = run(prefect_api, "all")
    assert errors == [None] * 3
    rollouts = {f"step 7 / rollout {group}" for group in ("0", "1", "2.0", "2.1")}
    shown = states(prefect_api, flow_run_id)
    assert shown == dict.fromkeys(rollouts | {f"step 7 / score {group}" for group in range(3)}, "COMPLETED")
    assert n_started == len(shown)
    assert messages(prefect_api, flow_run_id) == {"2 complete", "2 scores"}
    followed = edges(prefect_api, flow_run_id)
    assert followed == {name: set[str]() for name in rollouts} | {
        f"step 7 / score {group}": {f"step 7 / rollout {rollout}"}
        for group, rollout in ((0, "0"), (1, "1"), (2, "2.1"))
    }


def test_a_rollout_that_raises_fails_its_task_run_and_is_not_scored(prefect_api: str) -> None:
    flow_run_id, errors, _ = run(prefect_api, "all", error=True)
    assert [type(each) for each in errors] == [type(None), type(None), ValueError]
    shown = states(prefect_api, flow_run_id)
    assert shown["step 7 / rollout 2.1"] == "FAILED"
    assert "step 7 / score 2" not in shown


def test_a_concurrency_limit_of_their_tag_limits_rollouts(prefect_api: str) -> None:
    tags = f"rollouts-{uuid4().hex}", "scores"
    patient.post(f"{prefect_api}/concurrency_limits/", json={"tag": tags[0], "concurrency_limit": 1})
    Chunk.most_running = 0
    run(prefect_api, "all")
    assert Chunk.most_running > 1
    Chunk.most_running = 0
    flow_run_id, errors, _ = run(prefect_api, "all", tags=tags)
    assert errors == [None, None, None]
    assert Chunk.most_running == 1
    tagged = {(each["name"].split()[3], *each["tags"]) for each in found(prefect_api, flow_run_id)}
    assert tagged == {("rollout", tags[0]), ("score", tags[1])}


def test_a_rollout_begins_before_its_task_run_and_a_score_does_not_wait_for_its_end(prefect_api: str) -> None:
    class Started(Chunk):
        async def sample(self) -> SampledChunk:
            started.append(recording.n_started)
            return await super().sample()

        async def score(self) -> ScoredChunk:
            started.append(recording.n_started)
            return await super().score()

    @flow(persist_result=False)
    async def collect() -> None:
        recorder = TaskRunRecorder(ObserveConfig(), recording)
        async with asyncio.TaskGroup() as recordings:
            async with recorder.rollout(Started(), 7, "0", recordings) as rolled:
                rolled.done(await rolled.work())
            async with recorder.score(Started(), 7, "0", recordings, after=[rolled]) as scored:
                scored.done(await scored.work())

    started: list[int] = []
    recording = Recording()
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        asyncio.run(collect())
    assert started == [0, 1]  # no task run yet; then that of the rollout alone
    assert recording.n_started == 2


def test_a_step_of_very_many_groups_has_events_and_says_so() -> None:
    said: list[str] = []
    few, many = (choose_task_runs(ObserveConfig(), n, said.append) for n in (MOST_GROUPS, MOST_GROUPS + 1))
    assert (few.task_runs, many.task_runs) == ("all", "events")
    (line,) = said
    assert line.startswith(
        "rollout.groups_per_step is 2001, above 2000: Prefect gets an event for each group"
    )


def test_every_group_is_one_task_run(prefect_api: str) -> None:
    flow_run_id, errors, n_started = run(prefect_api, "groups", error=True)
    assert errors[:2] == [None, None]
    assert isinstance(errors[2], ValueError)
    ends = ("COMPLETED", "COMPLETED", "FAILED")
    assert states(prefect_api, flow_run_id) == {
        f"step 7 / group {group}": state for group, state in enumerate(ends)
    }
    assert n_started == 3
    logged = messages(prefect_api, flow_run_id)
    assert "rollout 0: 2 complete; score 0: 2 scores" in logged
    assert "Task run encountered an exception ValueError: no prompt" in logged


def test_every_group_is_an_event_that_reports_its_tasks_and_no_task_run(prefect_api: str) -> None:
    flow_run_id, errors, n_started = run(prefect_api, "events", error=True)
    assert errors[:2] == [None, None]
    assert isinstance(errors[2], ValueError)
    found = events(prefect_api, flow_run_id, lambda found: len(found) == 3)
    payloads = {each["payload"]["group"]: each["payload"] for each in found}
    assert payloads[0]["end"] == "done"
    assert payloads[0]["tasks"] == {"rollout 0": "2 complete", "score 0": "2 scores"}
    assert payloads[2]["end"] == "failed: ValueError: no prompt"
    assert payloads[2]["tasks"] == {"rollout 2.0": "2 complete"}
    assert {each["step"] for each in payloads.values()} == {7}
    assert (states(prefect_api, flow_run_id), n_started) == ({}, 0)
