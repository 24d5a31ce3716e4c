"""The sync task, as Prefect sees it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.serve.client import VllmClient
from tasks.sync import drive
from tasks.sync.config import SyncConfig
from tasks.sync.order import WeightAnswer


@task(name="sync", task_run_name="version {version} / sync", cache_policy=NO_CACHE, persist_result=False)
async def send_weights(
    source: drive.WeightSource, server: VllmClient, version: str, config: SyncConfig, prefix: str
) -> WeightAnswer:
    """Replace a server's weights by the trainer's."""
    return await drive.send_weights(source, server, version, config, prefix)
