"""The command `rollmill run --deployment`: creates a flow run of a deployment, for a worker to pick up."""

import asyncio
from pathlib import Path

import typer
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from rollmill.flows.checks.plug_in_arguments import check_plug_in_arguments
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.forms import POST_TRAIN
from rollmill.flows.prefect_integration.links import flow_run_page, ui_url
from rollmill.flows.prefect_integration.work_pools import missing_worker
from rollmill.flows.run.folder import check_movable, check_resumable, is_finished, move_aside, run_folder
from rollmill.tasks.errors import ConfigError, ServiceError

FLOW = "post-train"


def run_deployment(config: RunConfig, name: str, deployment: str, *, again: bool, redo_failed: bool) -> None:
    """Create a flow run of a deployment; prints the address of its page, and how to start a worker if none is online.

    The arguments of plug-ins that can be imported here are checked first. The flow checks, on the worker's machine, what the run
    needs there.

    Args:
        config: all settings.
        name: folder of the run below `store.root`.
        deployment: name of the deployment, after the slash.
        again: move a finished run of that name to NAME-N; needs a worker whose working folder is this one.
        redo_failed: sample failed trajectories of the steps without a batch again, and score again what the scorer failed on.

    Raises:
        ConfigError: there is no such deployment, an argument of a plug-in is wrong, or the run in the folder cannot be resumed with these settings.
        ServiceError: Prefect refused the parameters.
    """
    run_folder(name, config)
    check_plug_in_arguments(config)
    parameters = {"run_name": name, "config": POST_TRAIN.values(config), "redo_failed": redo_failed}

    async def create() -> list[str]:
        async with get_client() as client:
            found = await _read_deployment(client, f"{FLOW}/{deployment}")
            await asyncio.to_thread(_clear_folder, name, config, found, again=again)
            try:
                run = await client.create_flow_run_from_deployment(found.id, parameters=parameters, name=name)
            except PrefectHTTPStatusError as error:
                raise ServiceError("Prefect", f"it refused the run: {error.response.text}") from error
            lines = [f"flow run {name}: {flow_run_page(run.id)}"]
            return [*lines, *await missing_worker(client, found.work_pool_name or "")]

    for line in asyncio.run(create()):
        typer.echo(line)


async def _read_deployment(client: PrefectClient, name: str) -> DeploymentResponse:
    try:
        return await client.read_deployment_by_name(name)
    except ObjectNotFound:
        flow_filter = FlowFilter(name=FlowFilterName(any_=[FLOW]))
        known = sorted(each.name for each in await client.read_deployments(flow_filter=flow_filter))
        there_are = f"there are {', '.join(known)}: name one with --deployed-as; " if known else ""
        remedy = f"the Prefect server at {ui_url()} has no such deployment; {there_are}`rollmill deploy` creates those of prefect.yaml"
        raise ConfigError("--deployment", name, remedy) from None


def _clear_folder(name: str, config: RunConfig, deployment: DeploymentResponse, *, again: bool) -> None:
    """Check that the run can be resumed, or rename a finished one if `again`; only if the worker works in this folder.

    Otherwise the flow checks the run on the worker's machine, and `again` raises ConfigError.
    """
    folder = run_folder(name, config)
    # Elsewhere the flow checks the folder, on the worker's machine.
    if not folder.is_local or (deployment.job_variables or {}).get("working_dir") != str(Path.cwd()):
        if again:
            remedy = f"{folder.location} is not below this folder; choose another --name"
            raise ConfigError("--again", True, remedy)
        return
    if again and is_finished(folder):
        check_movable(folder)
        move_aside(folder, config.store)
    else:
        check_resumable(folder, config)
