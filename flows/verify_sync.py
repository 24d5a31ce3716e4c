"""The flow verify-sync: sends a run's weights to its servers and compares every tensor and the live models."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from prefect import flow
from rich.console import Console

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.failure import one_error
from rollmill.flows.offline.replay_trainer import ReplayTrainer, make_scratch, scratch_variables
from rollmill.flows.policies.services import open_services
from rollmill.flows.policies.sync_report import SyncVerdict, verdict_table
from rollmill.flows.policies.trainer_weights import WeightFiles
from rollmill.flows.start_model import ensure_start_model
from rollmill.tasks.errors import SyncError
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.checkpoints.weight_snapshots import weights_location
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.resume import find_resume_point
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.sync.broadcast import VERIFY, Broadcast, find_route
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_messages import SendTarget, WeightUpdateResponse
from rollmill.tasks.train.service.commands import DigestWeights
from rollmill.tasks.train.service.trainer_client import TrainerClient


@flow(name="verify-sync", flow_run_name="{run}", persist_result=False)
async def verify_sync(run: str, config: RunConfig) -> str:
    """Send the weights of a run's last version to its servers and compare all of them; the run is locked meanwhile.

    Only the run's epoch and incarnation change. Services are launched or attached to as when the run is resumed.

    Args:
        run: the run's folder, or s3://bucket/prefix.
        config: all settings.

    Returns:
        The version and the number of verified servers, in words.

    Raises:
        SyncError: a server did not take the weights, or something differs; names what.
    """
    folder = RunFolder(run)
    with one_error(), make_scratch(folder) as scratch:
        model = await ensure_start_model(config)
        with await asyncio.to_thread(partial(OpenRun.extend, folder, config_of=config.store)) as store:
            variables = scratch_variables(scratch)
            services = open_services(config, model, scratch, with_servers=True, variables=variables)
            async with services as (trainer, servers):
                version = await _load_last_version(store, trainer.client, model)
                location = weights_location(folder, store.manifest.run, config.sync.folder)
                clients = [each.client for each in servers]
                verdicts = await verify_weights(trainer.client, version, clients, config.sync, location)
    Console().print(verdict_table(verdicts))
    return summarize(verdicts, version.version)


def summarize(verdicts: Sequence[SyncVerdict], version: int) -> str:
    """Return a sentence with the version and the number of servers that have the trainer's weights.

    Raises:
        SyncError: something differs; names what, server by server.
    """
    if wrong := [each for each in verdicts if each.differing]:
        names = "; ".join(f"server {each.server}: {', '.join(each.differing)}" for each in wrong)
        raise SyncError(f"version {version} differs from the trainer's on servers: {names}")
    return f"version {version} equals the trainer's on {len(verdicts)} of {len(verdicts)} servers"


async def verify_weights(
    trainer: TrainerClient,
    version: PolicyVersion,
    servers: Sequence[VllmClient],
    config: SyncConfig,
    location: str,
) -> list[SyncVerdict]:
    """Send weights to servers, then send them again for each server to compare with what it loaded; return the results.

    Args:
        trainer: at the version.
        version: the version to send.
        servers: the servers.
        config: transport and mode.
        location: where the trainer writes the weights for servers that read files.

    Raises:
        SyncError: a server did not receive the weights.
    """
    # Twice: servers first take the weights, then compare a second copy with what they compute with.
    await _broadcast(trainer, version, servers, config, location)
    digests = await trainer.do(DigestWeights())
    responses = await _broadcast(trainer, version, servers, config, location, list(digests))
    return [SyncVerdict.of(server.url, responses[server], digests) for server in servers]


async def _broadcast(
    trainer: TrainerClient,
    version: PolicyVersion,
    servers: Sequence[VllmClient],
    config: SyncConfig,
    location: str,
    compared: Sequence[str] = (),
) -> dict[VllmClient, WeightUpdateResponse]:
    """Send the weights to all servers, or, given names of tensors (`compared`), have servers only compare them."""
    offer = await trainer.offer()
    with one_error():
        async with asyncio.TaskGroup() as group:
            finding = {each: group.create_task(find_route(each, offer, config)) for each in servers}
    routes: Mapping[VllmClient, SendTarget] = {server: found.result()[0] for server, found in finding.items()}
    files, mode = WeightFiles(trainer, location, config.timeout_s), VERIFY if compared else ""
    try:
        routes, paths = await files.write_for(routes, version)
        broadcast = Broadcast(trainer, offer, routes, str(version), config, compared, paths, mode=mode)
        with one_error():
            async with asyncio.TaskGroup() as group:
                group.create_task(broadcast.send())
                responses = {each: group.create_task(broadcast.update_server(each)) for each in servers}
    finally:
        await files.clear()
    return {server: response.result() for server, response in responses.items()}


async def _load_last_version(store: OpenRun, client: TrainerClient, model: Path) -> PolicyVersion:
    """Bring the trainer to the run's last version: load the last checkpoint, and apply the stored batches after it."""
    point = await asyncio.to_thread(find_resume_point, store.folder)
    incarnation = await asyncio.to_thread(store.next_incarnation)
    trainer = ReplayTrainer(store.folder, store.manifest, client, model, incarnation)
    await trainer.replay(point.checkpoint_version or 0, point.stored_batches)
    return PolicyVersion(store.manifest.run, incarnation, point.stored_batches)
