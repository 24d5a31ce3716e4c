"""The sync task, as Prefect sees it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.sync.drive import Dispatch
from tasks.sync.order import Sent


@task(name="sync", task_run_name="version {version} / sync", cache_policy=NO_CACHE, persist_result=False)
async def send_weights(dispatch: Dispatch, version: str) -> list[Sent]:
    """Have the trainer send its weights to all servers of a dispatch."""
    return await dispatch.send()
