"""What `rollmill deploy` needs on a Prefect server: work pools, queues, workers and automations."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import WorkerStatus
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from rollmill.flows.prefect_integration.links import deployment_page
from rollmill.tasks.errors import ConfigError

DESCRIPTION = "Runs of Rollmill's flows."
AUTOMATIONS = Path(__file__).with_name("automations.yaml")


async def ensure_pool(name: str, kind: str) -> None:
    """Create a Prefect work pool of type `kind` if none has this name; do not change an existing one.

    Raises:
        ConfigError: it exists and is of another kind.
    """
    async with get_client() as client:
        try:
            found = await client.read_work_pool(name)
        except ObjectNotFound:
            # The worker's default template declares a job's variables, such as its command.
            template = await get_default_base_job_template_for_infrastructure_type(kind)
            pool = WorkPoolCreate(
                name=name, type=kind, description=DESCRIPTION, base_job_template=template or {}
            )
            await client.create_work_pool(pool)
            return
    if found.type != kind:
        remedy = (
            f"this work pool has the type {found.type}, not {kind}; choose another name in prefect.yaml, or remove it: "
            f"prefect work-pool delete {name}"
        )
        raise ConfigError("work pool", name, remedy)


async def limit_queue(pool: str, queue: str, limit: int) -> None:
    """Ensure that a work queue has a concurrency limit: create the queue, or set `limit` where it has none.

    A limit that a user has set is not changed. A build step of prefect.yaml calls this.
    """
    async with get_client() as client:
        try:
            found = await client.read_work_queue_by_name(queue, work_pool_name=pool)
        except ObjectNotFound:
            await client.create_work_queue(queue, concurrency_limit=limit, work_pool_name=pool)
            return
        # Prefect creates a queue without a limit when a deployment names it first.
        if found.concurrency_limit is None:
            await client.update_work_queue(found.id, concurrency_limit=limit)


async def describe_deployments(names: Sequence[str], pool: str) -> list[str]:
    """Return lines for the terminal: the UI's page of each deployment, and how to start a worker if none is online."""
    async with get_client() as client:
        lines = []
        for name in names:
            found = await client.read_deployment_by_name(name)
            lines.append(f"{name:<24} {deployment_page(found.id)}")
        return [*lines, *await missing_worker(client, pool)]


async def missing_worker(client: PrefectClient, pool: str) -> list[str]:
    """Return lines for the terminal that say how to start a worker; empty if a worker of the pool is online."""
    workers = await client.read_workers_for_work_pool(pool)
    if any(each.status == WorkerStatus.ONLINE for each in workers):
        return []
    command = (
        f"PREFECT_API_URL={os.environ['PREFECT_API_URL']} {_prefect_command()} worker start --pool {pool}"
    )
    return [
        f"no worker of the work pool {pool} is online; start one on the machine that is to run the flows:",
        f"  {command}",
    ]


def _prefect_command() -> str:
    """Return what to type in a shell in the current folder to run this environment's `prefect`: its name or path."""
    own = Path(sys.executable).parent / "prefect"
    if Path(shutil.which("prefect") or "") == own:
        return "prefect"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def read_automations() -> list[AutomationCore]:
    """Read the automations in automations.yaml."""
    return [
        AutomationCore.model_validate(each) for each in yaml.safe_load(AUTOMATIONS.read_text())["automations"]
    ]


async def put_automations(automations: list[AutomationCore]) -> None:
    """Create automations on the server of PREFECT_API_URL; one with the same name is updated, and further ones are deleted."""
    async with get_client() as client:
        for each in automations:
            await _put(client, each)


async def put_shipped_automations() -> None:
    """Create or update the automations of automations.yaml on the Prefect server.

    A build step of deploy/kubernetes/deployments.yaml.
    """
    await put_automations(read_automations())


async def _put(client: PrefectClient, automation: AutomationCore) -> None:
    existing = await client.read_automations_by_name(automation.name)
    for duplicate in existing[1:]:
        await client.delete_automation(duplicate.id)
    if existing:
        await client.update_automation(existing[0].id, automation)
    else:
        await client.create_automation(automation)
