"""Stored batches applied again from a stored checkpoint, and whether they give the next stored one, byte for byte."""

import asyncio
import tempfile
from pathlib import Path

from prefect import flow
from rich.console import Console

from flows.config import RunConfig
from flows.failure import one_error
from flows.policies.comparison import StepComparison, first_difference, table_of, versions_of
from flows.policies.services import open_services
from flows.settings import validate
from flows.start_model import ensure_start_model
from flows.ui.terminating import ended_in_order
from tasks.errors import ReplayError
from tasks.store.batch import stored_digest
from tasks.store.layout import SCRATCH_ENV, RunFolder, checkpoint_key
from tasks.store.manifest import read_manifest
from tasks.store.resume import complete_checkpoints
from tasks.train.client import TrainerClient
from tasks.train.protocol import StepResult
from tasks.train.task import train_step


@flow(name="replay", flow_run_name="{run} {first} to {last}", persist_result=False)
async def replay(run: str, first: int, last: int) -> str:
    """Apply the stored batches first .. last - 1 again, and compare; nothing is written into the run.

    A trainer is launched with the run's settings; with the same ranks and threads on CPU it gives the same bytes.

    Args:
        run: the run's folder, or s3://bucket/prefix.
        first: version to begin from: one with a checkpoint, or 0 for the start model.
        last: version to end at, one with a checkpoint.

    Returns:
        How it went, in words.

    Raises:
        ReplayError: weights, moments or a step's metrics are not those that are stored; names the first.
    """
    folder = RunFolder(run)
    manifest = await asyncio.to_thread(read_manifest, folder)
    config = launched_here(validate(manifest.config))
    versions = versions_of(await asyncio.to_thread(complete_checkpoints, folder), first, last)
    with ended_in_order(), one_error(), workplace(folder) as place:
        model = await ensure_start_model(config)
        variables = {SCRATCH_ENV: str(Path(place) / "scratch")}
        services = open_services(config, model, Path(place), with_servers=False, variables=variables)
        async with services as (trainer, _):
            replaying = Replaying(folder, manifest.run, trainer.client, model)
            await replaying.load(versions.first)
            results = [await replaying.step(step) for step in range(versions.first, versions.last)]
            replayed = await trainer.client.digests()
            await replaying.load(versions.last)
            stored = await trainer.client.digests()
    steps = [await asyncio.to_thread(StepComparison.of, folder, result) for result in results]
    Console().print(table_of(folder, steps))
    if difference := first_difference(steps, stored, replayed):
        raise ReplayError(f"{folder.location}, versions {first} to {last}: {difference}")
    return f"{len(stored)} tensors of version {last} are the same, byte for byte"


def workplace(folder: RunFolder) -> tempfile.TemporaryDirectory[str]:
    """A folder for the trainer's log, and for its copies of checkpoints: none of those of a trainer that trains the run.

    That of a run on S3 lies on the disk that ROLLMILL_SCRATCH names, since checkpoints are large.
    """
    if folder.is_local:
        return tempfile.TemporaryDirectory()
    beside = folder.local.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="replay-", dir=beside)


class Replaying:
    """A trainer that applies a run's stored batches, and hands over nothing that it makes of them.

    Attributes:
        client: of the trainer.
    """

    def __init__(
        self, folder: RunFolder, run: str, client: TrainerClient, model: Path, incarnation: int = 0
    ) -> None:
        self.client = client
        self._folder, self._run, self._model = folder, run, model
        self._incarnation = incarnation

    async def load(self, version: int) -> None:
        """Stand at a version: that of a checkpoint, or 0."""
        await self.client.load(
            run=self._run,
            incarnation=self._incarnation,
            model=str(self._model),
            folder=self._folder.location,
            checkpoint=self._folder.path(checkpoint_key(version)) if version else None,
            version=version,
        )

    async def step(self, step: int) -> StepResult:
        """Apply the stored batch of a step."""
        digest = await asyncio.to_thread(stored_digest, self._folder, step)
        location = self._folder.location
        return await train_step(self.client, location, self._run, step, digest, hands_over=False)


def launched_here(config: RunConfig) -> RunConfig:
    """The same settings for a trainer of our own, also of a run that attached to one."""
    return config.model_copy(update={"train": config.train.model_copy(update={"url": "", "port": 0})})
