"""What `rollmill run --deployment` does: a flow run of a deployment, for a worker to take."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from flows.config import RunConfig
from flows.deploying.work_pools import missing_worker
from flows.running.folder import check_movable, check_resumable, is_finished, move_aside, run_folder
from flows.ui.links import flow_run_page, ui_url
from tasks.errors import ConfigError, ServiceError

FLOW = "post-train"


@dataclass(frozen=True, slots=True)
class Order:
    """A run that a deployment is to do.

    Attributes:
        deployment: its name after the slash.
        run_name: folder of the run below `store.root`.
        again: move a finished run of that name aside; possible where the worker's folder is this one.
        redo_failed: sample what failed of the steps without a batch again.
    """

    deployment: str
    run_name: str
    config: RunConfig
    again: bool = False
    redo_failed: bool = False


def trigger(order: Order) -> None:
    """Create the flow run, and print where it is seen and what is missing for it to begin.

    Raises:
        ConfigError: there is no such deployment, or its run cannot be gone on with like this.
        ServiceError: Prefect refused the parameters.
    """
    for line in asyncio.run(_triggered(order)):
        typer.echo(line)


async def _triggered(order: Order) -> list[str]:
    async with get_client() as client:
        deployment = await _deployment(client, f"{FLOW}/{order.deployment}")
        await asyncio.to_thread(_make_way, order, deployment)
        parameters: dict[str, Any] = {
            "run_name": order.run_name,
            "config": order.config.model_dump(mode="json"),
            "redo_failed": order.redo_failed,
        }
        try:
            run = await client.create_flow_run_from_deployment(
                deployment.id, parameters=parameters, name=order.run_name
            )
        except PrefectHTTPStatusError as error:
            raise ServiceError("Prefect", f"it refused the run: {error.response.text}") from error
        lines = [f"flow run {order.run_name}: {flow_run_page(run.id)}"]
        pool = deployment.work_pool_name or ""
        return [*lines, *await missing_worker(client, pool)]


async def _deployment(client: PrefectClient, name: str) -> DeploymentResponse:
    try:
        return await client.read_deployment_by_name(name)
    except ObjectNotFound:
        flow_filter = FlowFilter(name=FlowFilterName(any_=[FLOW]))
        known = sorted(each.name for each in await client.read_deployments(flow_filter=flow_filter))
        there_are = f"there are {', '.join(known)}: name one with --deployed-as; " if known else ""
        remedy = f"the Prefect server at {ui_url()} has no such deployment; {there_are}`rollmill deploy` makes those of prefect.yaml"
        raise ConfigError("--deployment", name, remedy) from None


def _make_way(order: Order, deployment: DeploymentResponse) -> None:
    """What can be said, and done, of a run's folder where the worker's folder is this one; else the flow says it."""
    folder = run_folder(order.run_name, order.config)
    if not folder.is_local or (deployment.job_variables or {}).get("working_dir") != str(Path.cwd()):
        if order.again:
            remedy = f"{folder.location} is not a folder below this one: begin under another --name"
            raise ConfigError("--again", True, remedy)
        return
    if order.again and is_finished(folder):
        check_movable(folder)
        move_aside(folder)
    else:
        check_resumable(folder, order.config)
