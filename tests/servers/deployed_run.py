"""A deployment of a workplace's preset `small` on a separate work pool, and its runs, controlled as by the UI."""

import asyncio
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import yaml
from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.workers.process import ProcessWorker

from rollmill.flows.prefect_integration.deployments import ENGINE
from rollmill.flows.prefect_integration.flow_run import in_flow_run
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps
from tests.stubs.toy_settings import validate_toy

DEADLINE_S = 400.0
LOOK_AGAIN_S = 0.2
NAME = "controlled"
WORK = ("/ rollout ", "/ score ", "/ evaluate ", "/ train ", "/ sync ")
"""Names of task runs that do something."""
ENDED = {"Completed", "Cancelled", "RolledBack"}
"""States in which a cancelled run may leave its task runs. Prefect calls one that the cancellation met at its very end RolledBack."""


class Deployed:
    """The deployment, whose runs have the name `controlled`."""

    def __init__(self, client: PrefectClient, place: Any, pool: str, deployment: UUID, root: str) -> None:
        self.client, self.place, self.pool, self.deployment = client, place, pool, deployment
        self.folder = RunFolder(f"{root}/{NAME}")

    async def start(self) -> UUID:
        return (await self.client.create_flow_run_from_deployment(self.deployment)).id

    async def set(self, flow_run: UUID, state: str, name: str, **details: object) -> None:
        """Set a state by the request that the UI sends."""
        body = {"state": {"type": state, "name": name, "state_details": details}, "force": bool(details)}
        answer = await self.client._client.post(f"/flow_runs/{flow_run}/set_state", json=body)
        assert answer.json()["status"] == SetStateStatus.ACCEPT.value, answer.text

    async def cancelled(self, flow_run: UUID) -> None:
        """Cancel a run, and wait until it is cancelled and nothing of it is left."""
        await self.set(flow_run, "CANCELLING", "Cancelling")
        assert await self.when_over(flow_run) == StateType.CANCELLED
        of_deployment = FlowRunFilter.model_validate({"deployment_id": {"any_": [self.deployment]}})
        for each in await self.client.read_flow_runs(flow_run_filter=of_deployment):
            assert await self.when_over(each.id) == StateType.CANCELLED
        await self.when(flow_run, lambda _: not self.of_run())

    async def retried(self, flow_run: UUID) -> None:
        """Retry a run, and wait until a worker has it."""
        before = (await self.client.read_flow_run(flow_run)).run_count
        async with asyncio.timeout(DEADLINE_S):
            while (found := await self.client.read_flow_run(flow_run)).run_count <= before:
                # Runner and worker both report the end of the attempt before, and one may do so after the retry was scheduled.
                if found.state and found.state.is_final():
                    await self.set(flow_run, "SCHEDULED", "AwaitingRetry")
                await asyncio.sleep(LOOK_AGAIN_S)

    async def when_reported(self, flow_run: UUID) -> None:
        """Wait until the worker has reported the end of a killed run, as the runner has before: the later report would end a retry."""
        # The worker logs this advice after its report, also if the server did not take the report.
        await self.when(
            flow_run, lambda _: "prefect.flow_runs.worker - Check whether the flow run" in self.log()
        )

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

    async def when_going(self, flow_run: UUID, holds: Callable[[], bool]) -> None:
        """Wait until something holds; a run that ends before fails the test."""

        def is_so(found: FlowRun) -> bool:
            assert not (found.state and found.state.is_final()), (found.state, self.log())
            return holds()

        await self.when(flow_run, is_so)

    async def when_steps(self, flow_run: UUID, n: int) -> None:
        """Wait until so many steps are reported."""
        await self.when_going(flow_run, lambda: self.steps() >= n)

    async def when_task_run(self, flow_run: UUID, name: str) -> None:
        """Wait until a task of the run is running."""
        async with asyncio.timeout(DEADLINE_S):
            while not any(  # noqa: ASYNC110
                name in each and state == "Running"
                for each, state in (await self.task_runs(flow_run)).items()
            ):
                await asyncio.sleep(LOOK_AGAIN_S)

    async def task_runs(self, flow_run: UUID) -> dict[str, str | None]:
        """State of each task run of a run, by name and number."""
        of_run = FlowRunFilter.model_validate(in_flow_run(flow_run))
        found = await self.client.read_task_runs(flow_run_filter=of_run, limit=200)
        return {f"{each.name} {n}": each.state_name for n, each in enumerate(found)}

    async def work(self, flow_run: UUID) -> Set[str | None]:
        """States of the task runs that do something.

        A step's own may be called running by a request that a slow server took late.
        """
        states = await self.task_runs(flow_run)
        return {state for name, state in states.items() if any(each in name for each in WORK)}

    def steps(self) -> int:
        return len(list_steps(self.folder, "metrics"))

    def log(self) -> str:
        return str((self.place.folder / "worker.log").read_text(errors="replace")[-4000:])

    def of_run(self) -> dict[int, str]:
        """Processes of the run, those of the worker left out."""
        return {pid: line for pid, line in self.place.processes().items() if " worker start " not in line}


@asynccontextmanager
async def deploy(place: Any, flow: Flow[Any, Any], **values: Any) -> AsyncIterator[Deployed]:
    """A deployment of a flow, with these settings in place of sections of the preset."""
    pool = f"control-{uuid4().hex[:8]}"
    preset = yaml.safe_load((place.folder / "conf" / "small.yaml").read_text()) | values
    preset["train"] = {"max_skipped_steps": preset["steps"]} | preset["train"]
    config, module = validate_toy(preset), flow.fn.__module__
    async with get_client() as client:
        template = ProcessWorker.get_default_base_job_template()
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
        deployment = await client.create_deployment(
            await client.create_flow(flow),
            pool,
            entrypoint=f"{module}.{flow.fn.__name__}",
            work_pool_name=pool,
            parameters={"run_name": NAME, "config": config.model_dump(mode="json")},
            job_variables={"working_dir": str(place.folder), "command": ENGINE},
        )
        root = config.store.root if "://" in config.store.root else str(place.folder / config.store.root)
        yield Deployed(client, place, pool, deployment, root)
