"""Work pools, their queues and their workers, as a Prefect server has them."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from flows.ui.links import deployment_page
from tasks.errors import ConfigError

DESCRIPTION = "Runs of Rollmill's flows."


async def ensure_pool(name: str, kind: str) -> None:
    """Make a work pool unless it is there; one that is there stays as it is.

    Raises:
        ConfigError: it is there and of another kind.
    """
    async with get_client() as client:
        try:
            found = await client.read_work_pool(name)
        except ObjectNotFound:
            template = await get_default_base_job_template_for_infrastructure_type(kind)
            pool = WorkPoolCreate(
                name=name, type=kind, description=DESCRIPTION, base_job_template=template or {}
            )
            await client.create_work_pool(pool)
            return
    if found.type != kind:
        remedy = (
            f"this work pool is of the kind {found.type}, not {kind}; give another name in prefect.yaml, or remove it: "
            f"prefect work-pool delete {name}"
        )
        raise ConfigError("work pool", name, remedy)


async def limit_queue(pool: str, queue: str, limit: int) -> None:
    """See to it that a work queue is there, and lets so many runs at a time go on: a build step of prefect.yaml.

    A limit that somebody has set otherwise stays.
    """
    async with get_client() as client:
        try:
            found = await client.read_work_queue_by_name(queue, work_pool_name=pool)
        except ObjectNotFound:
            await client.create_work_queue(queue, concurrency_limit=limit, work_pool_name=pool)
            return
        if found.concurrency_limit is None:
            await client.update_work_queue(found.id, concurrency_limit=limit)


async def deployed(names: Sequence[str], pool: str) -> list[str]:
    """What there is now, a line for each deployment, and what comes next."""
    async with get_client() as client:
        lines = []
        for name in names:
            found = await client.read_deployment_by_name(name)
            lines.append(f"{name:<24} {deployment_page(found.id)}")
        return [*lines, *await missing_worker(client, pool)]


async def missing_worker(client: PrefectClient, pool: str) -> list[str]:
    """What to do when no worker takes runs from a pool; empty when one does."""
    workers = await client.read_workers_for_work_pool(pool)
    if any(each.status == WorkerStatus.ONLINE for each in workers):
        return []
    command = f"PREFECT_API_URL={os.environ['PREFECT_API_URL']} {_prefect()} worker start --pool {pool}"
    return [
        f"no worker takes runs from the work pool {pool}; start one, where the runs shall be:",
        f"  {command}",
    ]


def _prefect() -> str:
    """This environment's command of Prefect, as a shell here finds it."""
    own = Path(sys.executable).parent / "prefect"
    if Path(shutil.which("prefect") or "") == own:
        return "prefect"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))
