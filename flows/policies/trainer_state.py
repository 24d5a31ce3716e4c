"""The trainer's version: loaded from the run's folder, and advanced by training on stored batches."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollmill.flows.configuration.settings import SETTINGS_BY_STEP
from rollmill.flows.policies.checkpointing import other_ranks
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.live_run import TrainingRun
from rollmill.flows.run.submission import Submission
from rollmill.tasks.score.group_outcomes import RolloutOrigin
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.store.folders import RunFolder, checkpoint_key
from rollmill.tasks.store.run.resume import find_resume_point
from rollmill.tasks.store.staged_rows import ingest_rows
from rollmill.tasks.store.stored_batch import read_batch_digest
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import ComputeOldLogprobs, LoadPolicy, TrainStep
from rollmill.tasks.train.service.trainer_client import TrainerClient


async def load_policy(client: TrainerClient, folder: RunFolder, model: Path, policy: PolicyVersion) -> None:
    """Have a trainer load a policy version of a run's folder: one with a checkpoint, or version 0 from the start model."""
    checkpoint = folder.path(checkpoint_key(policy.version)) if policy.version else None
    await client.do(
        LoadPolicy(
            run_id=policy.run,
            incarnation=policy.incarnation,
            model=str(model),
            folder=folder.location,
            checkpoint=checkpoint,
            version=policy.version,
        )
    )


class TrainerState:
    """The policy version that a run's trainer is at, and all commands that change it.

    Attributes:
        current: the trainer's version; its number counts the stored batches that it has trained on.
        replayed: result of each stored batch that was trained on again since the last load, by step.
    """

    def __init__(self, run: TrainingRun, client: TrainerClient) -> None:
        self._run, self._client = run, client
        self.replayed: dict[int, StepResult] = {}
        self.current = PolicyVersion(run.id, 0, 0)

    @property
    def version(self) -> int:
        """Number of the trainer's policy version: how many stored batches it has trained on."""
        return self.current.version

    async def load(self) -> None:
        """Load the run's last complete checkpoint, or the start model, and train again on every batch stored since.

        Then `version` is the number of stored batches, and `replayed` has the results of the steps trained again.

        Raises:
            ServiceDiedError: the trainer is gone.
        """
        end = await self.load_checkpoint()
        for step in range(self.version, end):
            await self.replay(step)

    async def load_checkpoint(self) -> int:
        """Load the last complete checkpoint, or the start model; returns the number of stored batches.

        The loaded version may be lower: `replay` then trains again on the batches after it.
        """
        run = self._run
        point = await asyncio.to_thread(find_resume_point, run.folder)
        # A new one for each load: servers must not confuse the weights of an earlier trainer with this one's.
        incarnation = await asyncio.to_thread(run.store.next_incarnation)
        version = point.checkpoint_version or 0
        loaded = PolicyVersion(run.id, incarnation, version)
        await load_policy(self._client, run.folder, run.model, loaded)
        if version and (other := await asyncio.to_thread(other_ranks, run.folder, version, run.config)):
            say(other)
        self.replayed = {}
        self.current = loaded
        return point.stored_batches

    async def replay(self, step: int) -> None:
        """Train on the stored batch of a step again."""
        digest = await asyncio.to_thread(read_batch_digest, self._run.folder, step)
        await self.complete(step)
        result = await self.train(step, digest)
        self.replayed[step] = result
        self.advance_version(result)

    async def complete(self, step: int) -> None:
        """Fetch and store reference log-probabilities that a step's batch lacks, if the reference is a deployment."""
        if self._run.reference is not None:
            await self._run.reference.complete(step)

    async def train(self, step: int, digest: str) -> StepResult:
        """Train on the stored batch of the current step; the caller then passes the result to `advance_version`.

        Raises:
            ServiceDiedError: the trainer is gone.
        """
        submitted = Submission("ranks")
        starts_ns = dict[str, int]()
        command = TrainStep(
            folder=self._run.folder.location,
            run_id=self._run.id,
            step=step,
            digest=digest,
            settings=self._run.store.manifest.find_settings(step, SETTINGS_BY_STEP),
        )
        result = await self._client.do(command, starts=starts_ns)
        for rank, started_ns in starts_ns.items():
            submitted.note_start(rank, started_ns)
        submitted.book()
        store = self._run.store
        # Before any checkpoint includes the step: a resumed run does not train it again, and would lack these rows.
        for staged in result.staged:
            await ingest_rows(store.folder, store.files, store.writer, staged)
        return replace(result, metrics=[*result.metrics, *submitted.metrics("submit/ranks_")])

    def advance_version(self, result: StepResult) -> None:
        """Set the current version to the one that a step produced."""
        self.current = replace(self.current, version=result.version)

    async def score(
        self, step: int, trajectory_ids: Sequence[str], origin: RolloutOrigin | None = None
    ) -> None:
        """Have the trainer compute its log-probabilities of stored rollouts that a step trains on, and store them.

        Args:
            step: the step.
            trajectory_ids: the rollouts.
            origin: where they are stored; None: in this run, at `step`, which must be the trainer's.

        Raises:
            RollmillError: the trainer is at another step, or gone.
        """
        store = self._run.store
        staged = await self._client.do(
            ComputeOldLogprobs(
                folder=self._run.folder.location,
                run_id=self._run.id,
                step=step,
                trajectory_ids=list(trajectory_ids),
                source=origin.source if origin else "",
                source_step=origin.step if origin else 0,
            )
        )
        if staged is not None:
            await ingest_rows(store.folder, store.files, store.writer, staged)
