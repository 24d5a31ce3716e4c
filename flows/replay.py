"""The flow replay: applies stored batches again from a checkpoint, and compares with the next one byte for byte."""

import asyncio

from prefect import flow
from rich.console import Console

from rollmill.flows.configuration.settings import validate
from rollmill.flows.failure import one_error
from rollmill.flows.offline.replay_comparison import (
    StepComparison,
    choose_versions,
    comparison_table,
    first_difference,
)
from rollmill.flows.offline.replay_trainer import make_scratch, open_replay_trainer
from rollmill.flows.prefect_integration.private_prefect import end_in_order
from rollmill.flows.start_model import ensure_start_model
from rollmill.tasks.errors import ReplayError
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.resume import list_complete_checkpoints
from rollmill.tasks.train.service.commands import DigestState


@flow(name="replay", flow_run_name="{run} {first} to {last}", persist_result=False)
async def replay(run: str, first: int, last: int) -> str:
    """Apply the stored batches of steps first to last - 1 again, and compare; writes nothing to the run.

    A trainer is launched with the run's settings. With the same ranks and threads, on CPU, it gives the same bytes.

    Args:
        run: the run's folder, or s3://bucket/prefix.
        first: start version: one with a checkpoint, or 0 for the start model.
        last: end version, one with a checkpoint.

    Returns:
        How many tensors are the same, in words.

    Raises:
        ReplayError: weights, moments or a step's metrics differ from the stored ones; names the first.
    """
    folder = RunFolder(run)
    manifest = await asyncio.to_thread(read_manifest, folder)
    config = validate(manifest.config)
    choose_versions(await asyncio.to_thread(list_complete_checkpoints, folder), first, last)
    with end_in_order(), one_error(), make_scratch(folder) as scratch:
        model = await ensure_start_model(config)
        async with open_replay_trainer(folder, manifest, config, model, scratch) as trainer:
            results = await trainer.replay(first, last)
            replayed = await trainer.client.do(DigestState())
            # The digests of the checkpoint are computed by the same trainer, so both have the same form.
            await trainer.load(last)
            stored = await trainer.client.do(DigestState())
    steps = [await asyncio.to_thread(StepComparison.of, folder, result) for result in results]
    Console().print(comparison_table(folder, steps))
    # Raised after the table is printed: it shows which steps are the same.
    if difference := first_difference(steps, stored, replayed):
        raise ReplayError(f"{folder.location}, versions {first} to {last}: {difference}")
    return f"{len(stored)} tensors of version {last} are the same, byte for byte"
