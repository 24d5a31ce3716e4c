"""Whether a run's servers take its weights as they are: all tensors compared, and what the live models compute with."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prefect import flow
from rich.console import Console

from flows.config import RunConfig
from flows.failure import one_error
from flows.policies.services import open_services
from flows.policies.sync_verdict import SyncVerdict, table_of
from flows.replay import Replaying, workplace
from flows.running.submission import together
from flows.start_model import ensure_start_model
from tasks.errors import SyncError
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.store.layout import SCRATCH_ENV, RunFolder
from tasks.store.resume import resume_point
from tasks.store.run import OpenRun
from tasks.store.weights import addresses, remove_weights, weights_place
from tasks.sync.config import SyncConfig
from tasks.sync.drive import FILES, VERIFY, Dispatch, find_route
from tasks.sync.order import WeightAnswer
from tasks.train.client import TrainerClient


@flow(name="verify-sync", flow_run_name="{run}", persist_result=False)
async def verify_sync(run: str, config: RunConfig) -> str:
    """Give the servers of a run the weights that its folder stands at, and compare all of them; the run is locked.

    Of the run nothing changes but its incarnation. Services are launched, or attached to, as when it is gone on with.

    Args:
        run: the run's folder, or s3://bucket/prefix.
        config: all settings.

    Returns:
        How it went, in words.

    Raises:
        SyncError: a server did not take the weights, or something differs; names what.
    """
    folder = RunFolder(run)
    with one_error(), workplace(folder) as place:
        model = await ensure_start_model(config)
        with await asyncio.to_thread(partial(OpenRun.extend, folder, config_of=config.store)) as store:
            variables = {SCRATCH_ENV: str(Path(place) / "scratch")}
            services = open_services(config, model, Path(place), with_servers=True, variables=variables)
            async with services as (trainer, servers):
                version = await _stand_at_the_end(store, trainer.client, model)
                weights = weights_place(folder, store.manifest.run, config.sync.folder)
                giving = Giving(trainer.client, version, config.sync, weights)
                verdicts = await giving.verified([each.client for each in servers])
    Console().print(table_of(verdicts))
    return conclusion(verdicts, version.version)


def conclusion(verdicts: Sequence[SyncVerdict], version: int) -> str:
    """How it went, in words.

    Raises:
        SyncError: something differs; names what, server by server.
    """
    if wrong := [each for each in verdicts if each.differing]:
        told = "; ".join(f"server {each.server}: {', '.join(each.differing)}" for each in wrong)
        raise SyncError(f"version {version} is not on the servers as the trainer has it: {told}")
    return f"version {version} is as the trainer has it on {len(verdicts)} of {len(verdicts)} servers"


class Giving:
    """A trainer's weights to servers, which take them and are then compared with them.

    Args:
        trainer: stands at the version.
        version: the version.
        config: how the weights travel.
        place: where they are written for servers that take them by files.
    """

    def __init__(
        self, trainer: TrainerClient, version: PolicyVersion, config: SyncConfig, place: str
    ) -> None:
        self._trainer, self._version, self._config, self._place = trainer, version, config, place

    async def verified(self, servers: Sequence[VllmClient]) -> list[SyncVerdict]:
        """Have servers take the weights, and compare every tensor, and the live models.

        Raises:
            SyncError: a server did not take them.
        """
        await self._given(servers)
        sent = await self._trainer.weight_digests()
        answers = await self._given(servers, VERIFY, list(sent))
        return [SyncVerdict.of(server.url, answers[server], sent) for server in servers]

    async def _given(
        self, servers: Sequence[VllmClient], mode: str = "", checksums: Sequence[str] = ()
    ) -> dict[VllmClient, WeightAnswer]:
        offer = await self._trainer.offer()
        found = await together([partial(find_route, server, offer, self._config) for server in servers])
        routes = {server: route for server, (route, _) in zip(servers, found, strict=True)}
        is_written = any(route.transport == FILES for route in routes.values())
        files = await self._written() if is_written else ()
        version, config = str(self._version), self._config
        dispatch = Dispatch(self._trainer, offer, routes, version, config, checksums, files, mode=mode)
        try:
            with one_error():
                async with asyncio.TaskGroup() as group:
                    group.create_task(dispatch.send())
                    answers = {each: group.create_task(dispatch.take(each)) for each in servers}
        finally:
            if is_written:
                await asyncio.to_thread(remove_weights, self._place)
        return {server: answer.result() for server, answer in answers.items()}

    async def _written(self) -> Sequence[str]:
        files = await self._trainer.write_weights(self._place, self._version.version)
        return addresses(files, self._config.timeout_s)


async def _stand_at_the_end(store: OpenRun, trainer: TrainerClient, model: Path) -> PolicyVersion:
    """Bring the trainer to the folder's version: the last checkpoint, and the stored batches after it."""
    point = await asyncio.to_thread(resume_point, store.folder)
    incarnation = await asyncio.to_thread(store.next_incarnation)
    replaying = Replaying(store.folder, store.manifest.run, trainer, model, incarnation)
    await replaying.load(point.checkpoint_version or 0)
    for step in range(point.checkpoint_version or 0, point.stored_batches):
        await replaying.step(step)
    return PolicyVersion(store.manifest.run, incarnation, point.stored_batches)
