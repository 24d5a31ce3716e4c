"""What the trainer stands at: a version that it loads from the run's folder, and moves on by stored batches."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from flows.policies.checkpointing import other_ranks
from flows.running.run import TrainingRun
from flows.running.submission import Submission
from flows.ui.progress import say
from tasks.serve.version import PolicyVersion
from tasks.store.batch import stored_digest
from tasks.store.deliveries import take_in
from tasks.store.layout import checkpoint_key
from tasks.store.resume import resume_point
from tasks.train.client import TrainerClient
from tasks.train.protocol import StepResult
from tasks.train.task import train_step


class Trained:
    """The trainer's side of a run's policy. Nobody else gives it commands that move its version.

    Args:
        run: the run.
        client: the trainer's.

    Attributes:
        current: what the trainer stands at; its number is how many stored batches it has applied.
        replayed: what came of each stored batch that was applied again since the last load, by step.
    """

    def __init__(self, run: TrainingRun, client: TrainerClient) -> None:
        self._run, self._client = run, client
        self.replayed: dict[int, StepResult] = {}
        self.current = PolicyVersion(run.id, 0, 0)

    @property
    def version(self) -> int:
        """The number of the version that the trainer stands at."""
        return self.current.version

    async def load(self) -> None:
        """Bring the trainer to the folder's version."""
        end = await self.load_checkpoint()
        for step in range(self.version, end):
            await self.replay(step)

    async def load_checkpoint(self) -> int:
        """Load the last complete checkpoint; returns how many batches are stored."""
        run, folder = self._run, self._run.folder.location
        point = await asyncio.to_thread(resume_point, run.folder)
        version = point.checkpoint_version
        incarnation = await asyncio.to_thread(run.store.next_incarnation)
        await self._client.load(
            run=run.id,
            incarnation=incarnation,
            model=str(run.model),
            folder=folder,
            checkpoint=None if version is None else run.folder.path(checkpoint_key(version)),
            version=version or 0,
        )
        if version is not None and (
            other := await asyncio.to_thread(other_ranks, run.folder, version, run.config)
        ):
            say(other)
        self.replayed = {}
        self.current = PolicyVersion(run.id, incarnation, version or 0)
        return point.stored_batches

    async def replay(self, step: int) -> None:
        """Apply the stored batch of a step again."""
        run = self._run
        digest = await asyncio.to_thread(stored_digest, run.folder, step)
        await self.complete(step)
        result = await self._client.train_step(
            folder=run.folder.location, run=run.id, step=step, digest=digest
        )
        await self._take_in(result)
        self.replayed[step] = result
        self.moved(result)

    async def complete(self, step: int) -> None:
        """Ask the reference deployment for what a step's batch lacks."""
        if self._run.reference is not None:
            await self._run.reference.complete(step)

    async def train(self, step: int, digest: str) -> StepResult:
        """Apply the stored batch of the open step, which is complete, as a task run; call `moved` with the result.

        Raises:
            ServiceDiedError: the trainer is gone.
        """
        self._run.recording.started()
        submitted = Submission("ranks")
        result = await train_step(self._client, self._run.folder.location, self._run.id, step, digest)
        for rank, started_ns in result.starts_ns.items():
            submitted.started(rank, started_ns)
        submitted.book()
        await self._take_in(result)
        return replace(result, metrics=[*result.metrics, *submitted.metrics("submit/ranks_")])

    def moved(self, result: StepResult) -> None:
        """The trainer stands at another version."""
        self.current = replace(self.current, version=result.version)

    async def score(self, step: int, trajectory_ids: Sequence[str]) -> None:
        """Have the trainer compute its log-probabilities of stored rollouts, and store them.

        Raises:
            RollmillError: it does not stand at that step, or is gone.
        """
        store = self._run.store
        delivery = await self._client.score_rows(
            folder=self._run.folder.location, run=self._run.id, step=step, trajectory_ids=list(trajectory_ids)
        )
        if delivery is not None:
            await take_in(store.folder, store.files, store.writer, delivery)

    async def _take_in(self, result: StepResult) -> None:
        """Store the rows that the trainer has made in a step, before any checkpoint says that the step is done."""
        store = self._run.store
        for delivery in result.deliveries:
            await take_in(store.folder, store.files, store.writer, delivery)
