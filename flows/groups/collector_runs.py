"""The flow runs that a run's collectors are: started once for the run, ended with it."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.blocks.system import Secret
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Cancelling

from flows.config import RunConfig
from flows.failure import PREFECT_ERRORS
from flows.groups.collector import JoinConfig
from flows.groups.collectors import Collectors, port_of
from flows.running.run import Run
from flows.running.submission import together
from flows.ui.progress import say
from tasks.errors import ConfigError
from tasks.observe.metrics import Metric

TAG = "rollmill-collector"
WAITING = (StateType.SCHEDULED, StateType.PENDING)
TOKEN_BYTES = 24


@asynccontextmanager
async def open_collectors(run: Run) -> AsyncIterator[Collectors | None]:
    """Start the collectors that `rollout.collectors` asks for; None when it asks for none.

    However this is left, they end: those that have joined are told, and those that were not begun are cancelled. When
    this process is killed, they end since their connection to it does.

    Raises:
        ConfigError: there is no such deployment.
    """
    rollout = run.config.rollout
    if not rollout.collectors:
        yield None
        return
    token, is_finished = secrets.token_urlsafe(TOKEN_BYTES), False
    collectors = Collectors(run, token)
    async with collectors.listen() as server, get_client() as client:
        deployment = await _deployment(client, rollout.collector_deployment)
        await _cancel(client, await _unfinished(client, run))
        block = f"rollmill-collectors-{run.id}"
        await Secret(value=token).save(block, overwrite=True)
        try:
            await _start(client, deployment, run, f"ws://{rollout.collector_host}:{port_of(server)}", block)
            yield collectors
            is_finished = True
        finally:
            await collectors.end(is_finished=is_finished)
            await _clear(client, run, block)


def joined(collectors: Collectors | None) -> Sequence[Metric]:
    """How soon a run's collectors were there, for a step's metrics."""
    return collectors.metrics() if collectors else ()


async def _deployment(client: PrefectClient, name: str) -> UUID:
    try:
        return (await client.read_deployment_by_name(name)).id
    except (ObjectNotFound, ValueError) as error:
        remedy = "there is no such deployment on the Prefect server; make it with `rollmill deploy`, or name another"
        raise ConfigError("rollout.collector_deployment", name, remedy) from error


async def _start(client: PrefectClient, deployment: UUID, run: Run, url: str, block: str) -> None:
    """Have as many flow runs as there are to be collectors."""
    n = run.config.rollout.collectors
    await together(
        partial(_ask_for, client, deployment, run, _join(run, url, block, number))
        for number in range(1, n + 1)
    )
    say(f"{n} collectors are asked for: flow runs of {run.config.rollout.collector_deployment}")


def _join(run: Run, url: str, block: str, number: int) -> JoinConfig:
    """How a collector finds the run."""
    return JoinConfig(
        url=url,
        token_block=block,
        run=run.id,
        epoch=run.store.manifest.epoch,
        number=number,
        model=str(run.model.absolute()),
        logs=str((run.folder.logs / f"collector-{number}").absolute()),
    )


async def _ask_for(client: PrefectClient, deployment: UUID, run: Run, join: JoinConfig) -> None:
    """Have one flow run that is to be a collector; ConfigError when its deployment is another Rollmill's."""
    n = run.config.rollout.collectors
    parameters: dict[str, Any] = {
        "run_name": run.folder.name,
        "config": share_of(run.config, n).model_dump(mode="json"),
        "join": join.model_dump(mode="json"),
    }
    try:
        await client.create_flow_run_from_deployment(
            deployment,
            parameters=parameters,
            name=f"{run.folder.name} / collector {join.number}",
            tags=[TAG, f"rollmill-run:{run.id}"],
        )
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTPStatus.CONFLICT:
            raise
        remedy = (
            "this deployment takes other settings than this Rollmill has: make it anew with `rollmill deploy`"
        )
        raise ConfigError(
            "rollout.collector_deployment", run.config.rollout.collector_deployment, remedy
        ) from error


def share_of(config: RunConfig, n: int) -> RunConfig:
    """A collector's settings: together they are no further ahead of Prefect's server than one process would be."""
    ahead = max(1, config.observe.max_unrecorded_task_runs // n)
    observe = config.observe.model_copy(update={"max_unrecorded_task_runs": ahead})
    return config.model_copy(update={"observe": observe})


async def _unfinished(client: PrefectClient, run: Run) -> Sequence[tuple[UUID, bool]]:
    """Collectors of the run that are not over, and whether they have begun."""
    states = [*WAITING, StateType.RUNNING]
    found = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(
            {"tags": {"all_": [TAG, f"rollmill-run:{run.id}"]}, "state": {"type": {"any_": states}}}
        )
    )
    return [(each.id, each.state_type not in WAITING) for each in found]


async def _cancel(client: PrefectClient, flow_runs: Sequence[tuple[UUID, bool]]) -> None:
    async def cancel(flow_run_id: UUID, *, has_begun: bool) -> None:
        kind = Cancelling if has_begun else Cancelled
        await client.set_flow_run_state(flow_run_id, kind(message="The run does not collect any more."))

    await together(partial(cancel, flow_run, has_begun=begun) for flow_run, begun in flow_runs)


async def _clear(client: PrefectClient, run: Run, block: str) -> None:
    """Cancel what was not begun, and remove the token; a Prefect server that is gone is told of, and no more."""
    try:
        waiting = [each for each in await _unfinished(client, run) if not each[1]]
        await _cancel(client, waiting)
        document = await client.read_block_document_by_name(block, "secret")
        if document.id is not None:
            await client.delete_block_document(document.id)
    except PREFECT_ERRORS as error:
        say(f"collectors that have not begun are not all cancelled: {type(error).__name__}: {error}")
