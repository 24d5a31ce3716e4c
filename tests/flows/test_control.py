"""A deployed run under a real worker: cancelled and retried, paused and resumed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from flows.automations import put_automations, shipped
from flows.belonging import own_and_steps
from flows.collect import collect
from flows.post_train import post_train
from flows.settings import validate
from tasks.store.layout import RunFolder
from tasks.store.verification import verify_run

pytestmark = pytest.mark.service

DEADLINE_S = 400.0
LOOK_AGAIN_S = 0.2
ENDLESS = {"steps": 3000}
SECRET = "planted-in-the-environment"
SECRETS = {
    "ROLLMILL_VLLM_API_KEY": SECRET,
    "ROLLMILL_TRAINER_TOKEN": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
}


class Deployed:
    """A deployment of the preset `small` on a work pool of its own."""

    def __init__(self, client: PrefectClient, place: Any, pool: str, deployment: UUID) -> None:
        self.client, self.place, self.pool, self._deployment = client, place, pool, deployment
        self.folder = RunFolder(str(place.folder / "runs" / "controlled"))

    async def start(self) -> UUID:
        return (await self.client.create_flow_run_from_deployment(self._deployment)).id

    async def set(self, flow_run: UUID, state: str, name: str, **details: object) -> None:
        """Set a state by the request that the UI sends."""
        body = {"state": {"type": state, "name": name, "state_details": details}, "force": bool(details)}
        answer = await self.client._client.post(f"/flow_runs/{flow_run}/set_state", json=body)
        assert answer.json()["status"] == SetStateStatus.ACCEPT.value, answer.text

    async def when(self, flow_run: UUID, holds: Callable[[FlowRun], bool]) -> FlowRun:
        """Wait until something holds of a flow run."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds(found := await self.client.read_flow_run(flow_run)):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_AGAIN_S)
        return found

    async def when_over(self, flow_run: UUID) -> StateType | None:
        return (
            await self.when(flow_run, lambda found: bool(found.state and found.state.is_final()))
        ).state_type

    async def when_steps(self, flow_run: UUID, n: int) -> None:
        """Wait until so many steps are reported; a run that ends before fails the test."""

        def has_steps(found: FlowRun) -> bool:
            assert not (found.state and found.state.is_final()), (found.state, self.log())
            return self.steps() >= n

        await self.when(flow_run, has_steps)

    async def when_task_run(self, flow_run: UUID, name: str) -> None:
        """Wait until a task of the run, or of its steps, is running."""
        async with asyncio.timeout(DEADLINE_S):
            while not any(  # noqa: ASYNC110
                name in each and state == "Running"
                for each, state in (await self.task_runs(flow_run)).items()
            ):
                await asyncio.sleep(LOOK_AGAIN_S)

    async def task_runs(self, flow_run: UUID) -> dict[str, str | None]:
        """State of each task run of a run and its steps, by name and number."""
        of_run = FlowRunFilter.model_validate(own_and_steps(flow_run))
        found = await self.client.read_task_runs(flow_run_filter=of_run, limit=200)
        return {f"{each.name} {n}": each.state_name for n, each in enumerate(found)}

    def steps(self) -> int:
        return len(list(self.folder.local.glob("metrics/step=*")))

    def log(self) -> str:
        return str((self.place.folder / "worker.log").read_text(errors="replace")[-4000:])

    def of_run(self) -> dict[int, str]:
        """Processes of the run, those of the worker left out."""
        return {pid: line for pid, line in self.place.processes().items() if " worker start " not in line}


@asynccontextmanager
async def deployed(place: Any, flow: Flow[Any, Any] = post_train, **values: Any) -> AsyncIterator[Deployed]:
    preset = yaml.safe_load((place.folder / "conf" / "small.yaml").read_text()) | values
    preset["train"] |= {"max_skipped_steps": preset["steps"]}
    async with get_client() as client:
        pool = f"control-{uuid4().hex[:8]}"
        template = ProcessWorker.get_default_base_job_template()
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
        deployment = await client.create_deployment(
            await client.create_flow(flow),
            pool,
            entrypoint=f"{flow.fn.__module__}.{flow.fn.__name__}",
            work_pool_name=pool,
            parameters={"run_name": "controlled", "config": validate(preset).model_dump(mode="json")},
            job_variables={"working_dir": str(place.folder)},
        )
        yield Deployed(client, place, pool, deployment)


@pytest.fixture(autouse=True)
def _server(prefect_api: str) -> Any:
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        yield


async def test_a_run_cancelled_while_it_samples_leaves_nothing_behind_and_a_retry_finishes_it(
    workplace: Any, stub_python: str
) -> None:
    stub = workplace.folder / "stub.json"
    settings = {"steps": 5, "serve": {"python": stub_python}}
    async with deployed(workplace, collect, **settings) as run:
        with workplace.worker(run.pool):
            flow_run = await run.start()
            await run.when_steps(flow_run, 1)
            stub.write_text(json.dumps({"rollout_s": DEADLINE_S}))
            await run.when_task_run(flow_run, "rollout")
            await run.set(flow_run, "CANCELLING", "Cancelling")
            assert await run.when_over(flow_run) == StateType.CANCELLED
            assert not run.of_run()
            assert not verify_run(run.folder).findings
            assert set((await run.task_runs(flow_run)).values()) == {"Completed", "Cancelled"}

            stub.write_text("{}")
            await run.set(flow_run, "SCHEDULED", "AwaitingRetry")
            await run.when(flow_run, lambda found: found.run_count == 2)
            assert await run.when_over(flow_run) == StateType.COMPLETED, run.log()
        assert run.steps() == 5
        assert not verify_run(run.folder).findings


@pytest.mark.long
async def test_a_paused_run_ends_between_two_steps_and_a_resumed_one_goes_on_until_it_is_cancelled(
    workplace: Any, prefect_api: str
) -> None:
    async with deployed(workplace, **ENDLESS) as run:
        with workplace.worker(run.pool, **SECRETS):
            flow_run = await run.start()
            await run.when_steps(flow_run, 2)
            await check_keys(run)
            timeout = (datetime.now(UTC) + timedelta(seconds=300)).isoformat()
            await run.set(flow_run, "PAUSED", "Suspended", pause_timeout=timeout, pause_reschedule=True)
            await run.when(flow_run, lambda _: not run.of_run())
            n_steps = run.steps()
            assert (await run.client.read_flow_run(flow_run)).state_name == "Suspended"
            assert "paused before step" in run.log()
            assert not verify_run(run.folder).findings

            await run.client.resume_flow_run(flow_run)
            await run.when_steps(flow_run, n_steps + 1)
            await run.set(flow_run, "CANCELLING", "Cancelling")
            assert await run.when_over(flow_run) == StateType.CANCELLED
            assert not run.of_run()
            assert not verify_run(run.folder).findings
            assert set((await run.task_runs(flow_run)).values()) <= {"Completed", "Cancelled"}
            assert await told_secrets(run, prefect_api, flow_run) == []


async def test_an_automation_is_put_once() -> None:
    for _ in range(2):
        await put_automations(shipped())
    async with get_client() as client:
        (found,) = await client.read_automations_by_name(shipped()[0].name)
    assert found.enabled


async def check_keys(run: Deployed) -> None:
    """The launched services answer nobody without their keys."""
    lines = [line for line in run.of_run().values() if "api_server" in line and " --port " in line]
    port = lines[0].partition(" --port ")[2].split()[0]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for path in ("/pause", "/rollmill/weights", "/inference/v1/generate"):
            assert (await client.post(path)).status_code == 401
        assert (await client.get("/health")).status_code == 200


async def told_secrets(run: Deployed, api: str, flow_run: UUID) -> list[str]:
    """Where the planted secret is found: in files of the workplace, and in what Prefect has of the run."""
    files = [each for each in run.place.folder.rglob("*") if each.is_file()]
    assert any("trainer.log" in each.name for each in files)
    found = [str(each) for each in files if SECRET.encode() in each.read_bytes()]
    async with httpx.AsyncClient(base_url=api) as client:
        logs = {"logs": {"flow_run_id": {"any_": [str(flow_run)]}}}
        artifacts = {"artifacts": {"flow_run_id": {"any_": [str(flow_run)]}}}
        answers = [
            await client.post("/logs/filter", json=logs),
            await client.post("/artifacts/filter", json=artifacts),
            await client.get(f"/flow_runs/{flow_run}"),
        ]
    assert all(each.status_code == 200 for each in answers)
    return [*found, *(str(each.url) for each in answers if SECRET in each.text)]
