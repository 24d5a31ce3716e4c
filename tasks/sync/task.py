"""The sync task, as Prefect records it."""

from collections.abc import Sequence
from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollmill.tasks.observe.metrics import Metric


class SyncsWeights(Protocol):
    """Interface of a policy that brings its trainer's weights to its servers.

    No implementation is a dataclass: Prefect searches the fields of dataclasses among a task's parameters.
    """

    async def sync(self, *, only_name: bool) -> Sequence[Metric]:
        """Send every server the policy's present version: its weights, or its name alone; returns metrics of the sync."""


class SyncedVersion:
    """A policy version that all servers have received, and the metrics of that sync.

    An ordinary class, which weak references can refer to: Prefect needs one to find the task run that a later task follows.

    Attributes:
        version: the policy version.
        metrics: of the sync.
    """

    __slots__ = ("__weakref__", "metrics", "version")

    def __init__(self, version: int, metrics: Sequence[Metric]) -> None:
        self.version, self.metrics = version, metrics


# No retries, whatever PREFECT_TASKS_DEFAULT_RETRIES says: a server that fails is removed from the pool and brought back in the
# background, and the others continue.
@task(
    name="sync",
    task_run_name="version {version} / sync",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
async def sync_weights(policy: SyncsWeights, version: int, *, only_name: bool = False) -> SyncedVersion:
    """Bring the trainer's weights to all servers, and verify them.

    Args:
        policy: the policy.
        version: the version that its trainer has.
        only_name: True if the weights are those of the version before: servers learn the new version's name alone.
    """
    return SyncedVersion(version, await policy.sync(only_name=only_name))
