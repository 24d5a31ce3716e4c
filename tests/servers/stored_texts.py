"""All texts that are stored of a deployed run: files on disk, objects on S3, and what Prefect's API returns."""

from collections.abc import AsyncIterator, Collection
from typing import Any
from uuid import UUID

from deployed_run import Deployed
from prefect.client.orchestration import PrefectClient

from rollmill.flows.prefect_integration.flow_run import in_flow_run
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.s3.s3_objects import s3_filesystem

PAGE = 50
"""Fewer than there are log lines and task runs of a run of several steps, so that there is a second page."""


async def read_all_texts(run: Deployed, flow_run: UUID) -> dict[str, list[bytes]]:
    """Return all that is stored of a run, by kind: logs, artifacts, events, flow runs, task runs, deployment, files, data sets."""
    client = run.client
    runs = in_flow_run(flow_run)
    flow_runs = [each async for each in pages(client, "flow_runs", {"flow_runs": runs})]
    ids = [each["id"] for each in flow_runs]
    found: dict[str, list[Any]] = {
        "flow runs": flow_runs,
        "task runs": [each async for each in pages(client, "task_runs", {"flow_runs": runs})],
        "logs": [each async for each in pages(client, "logs", {"logs": {"flow_run_id": {"any_": ids}}})],
        "artifacts": [
            each async for each in pages(client, "artifacts", {"artifacts": {"flow_run_id": {"any_": ids}}})
        ],
        "events": [each async for each in events(client, ids)],
        "deployment": [
            (await client._client.get(address)).json()
            for address in (f"/deployments/{run.deployment}", f"/work_pools/{run.pool}")
        ],
    }
    return {kind: [repr(each).encode() for each in all_of_it] for kind, all_of_it in found.items()} | {
        "files": [each.read_bytes() for each in run.place.folder.rglob("*") if each.is_file()],
        "data sets": contents_of(run.folder),
    }


def contents_of(folder: RunFolder) -> list[bytes]:
    """Return the bytes of every file of a run, on disk or S3; shards are not compressed."""
    if folder.is_local:
        return [each.read_bytes() for each in folder.local.rglob("*") if each.is_file()]
    s3 = s3_filesystem()
    return [s3.cat_file(each) for each in s3.find(folder.location)]


async def pages(client: PrefectClient, kind: str, of_run: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Every page of what the API lists."""
    offset = 0
    while True:
        body = of_run | {"limit": PAGE, "offset": offset}
        answer = await client._client.post(f"/{kind}/filter", json=body)
        assert answer.status_code == 200, answer.text
        for each in answer.json():
            yield each
        if len(answer.json()) < PAGE:
            return
        offset += PAGE


async def events(client: PrefectClient, flow_runs: Collection[str]) -> AsyncIterator[dict[str, Any]]:
    """Every page of the events of flow runs."""
    resources = {"id": [f"prefect.flow-run.{each}" for each in flow_runs]}
    body = {"filter": {"any_resource": resources}, "limit": PAGE}
    answer = await client._client.post("/events/filter", json=body)
    while True:
        assert answer.status_code == 200, answer.text
        page = answer.json()
        for each in page["events"]:
            yield each
        if not page["next_page"]:
            return
        answer = await client._client.get(page["next_page"])
