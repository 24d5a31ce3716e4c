"""A trainer that applies a run's stored batches again and changes nothing of the run."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import SETTINGS_BY_STEP
from rollmill.flows.policies.services import open_services
from rollmill.flows.policies.trainer_state import load_policy
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder
from rollmill.tasks.store.run.manifest import Manifest
from rollmill.tasks.store.stored_batch import read_batch_digest
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import TrainStep
from rollmill.tasks.train.service.trainer_client import TrainerClient
from rollmill.tasks.train.task import train_step


class ReplayTrainer:
    """Has a trainer train on a run's stored batches again, and stores nothing of what the steps produce.

    Args:
        folder: of the run.
        manifest: content of its run.json; each step is trained under the settings that it was trained under.
        client: client of the trainer.
        model: folder of the start model.
        incarnation: in the name of the version that is loaded.
    """

    def __init__(
        self,
        folder: RunFolder,
        manifest: Manifest,
        client: TrainerClient,
        model: Path,
        incarnation: int = 0,
    ) -> None:
        self.client = client
        self._folder, self._manifest, self._model = folder, manifest, model
        self._incarnation = incarnation

    async def load(self, version: int) -> None:
        """Load a policy version: one with a checkpoint, or 0 for the start model."""
        policy = PolicyVersion(self._manifest.run, self._incarnation, version)
        await load_policy(self.client, self._folder, self._model, policy)

    async def replay(self, first: int, last: int) -> list[StepResult]:
        """Load version `first`, and apply the stored batches of steps `first` to `last` - 1; returns their results."""
        await self.load(first)
        results = []
        for step in range(first, last):
            digest = await asyncio.to_thread(read_batch_digest, self._folder, step)
            results.append((await train_step(self, step, digest)).result)
        return results

    async def train(self, step: int, digest: str) -> StepResult:
        """Apply the stored batch of a step; the rows that the trainer stages are not stored."""
        command = TrainStep(
            folder=self._folder.location,
            run_id=self._manifest.run,
            step=step,
            digest=digest,
            settings=self._manifest.find_settings(step, SETTINGS_BY_STEP),
            stages_rows=False,
        )
        return await self.client.do(command)


@asynccontextmanager
async def open_replay_trainer(
    folder: RunFolder, manifest: Manifest, config: RunConfig, model: Path, scratch: Path
) -> AsyncIterator[ReplayTrainer]:
    """Launch a trainer with a run's settings for the block, even if the run itself attached to one.

    `manifest` is the content of its run.json, `model` the folder of its start model, and `scratch` a folder from `make_scratch`.
    """
    async with open_services(
        use_own_trainer(config), model, scratch, with_servers=False, variables=scratch_variables(scratch)
    ) as (trainer, _):
        yield ReplayTrainer(folder, manifest, trainer.client, model)


@contextmanager
def make_scratch(folder: RunFolder) -> Iterator[Path]:
    """Create a temporary folder for the trainer's log and its copies of checkpoints; it is removed after the block.

    For a run on S3 it is on the disk that ROLLMILL_SCRATCH names, since checkpoints are large. It is separate from the
    folder of the trainer that trains the run.
    """
    above = None if folder.is_local else folder.local.absolute().parent
    if above:
        above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="replay-", dir=above) as scratch:
        yield Path(scratch)


def scratch_variables(scratch: Path) -> dict[str, str]:
    """Return the environment variables that make a trainer keep its copies of checkpoints below `scratch`."""
    return {SCRATCH_ENV: str(scratch / "scratch")}


def use_own_trainer(config: RunConfig) -> RunConfig:
    """Return the settings without train.url, so that a trainer is launched here instead of attached to."""
    return config.model_copy(update={"train": config.train.model_copy(update={"url": ""})})
