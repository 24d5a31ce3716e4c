"""The policy's version: brought up in trainer, servers and folder alike, moved on, brought back after a death."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from flows.report import has_metrics, store_metrics
from flows.run import Run
from flows.services import ServerService, Services, TrainerService, open_services, restart
from tasks.errors import RequestError, ServiceDiedError, ServiceError, SkippedStepsError, SyncError
from tasks.serve.version import PolicyVersion
from tasks.store.batch import stored_digest, stored_sequences
from tasks.store.resume import resume_point
from tasks.sync.task import SyncPart, sync_weights
from tasks.train.client import StepResult
from tasks.train.task import TrainPart, train_step

DEATHS = (ServiceError, RequestError)


class Policy:
    """One run's policy, in trainer, servers and folder.

    Attributes:
        current: what the trainer stands at; its number is how many stored batches it has applied.
    """

    def __init__(self, run: Run, services: Services) -> None:
        self._run, self._services = run, services
        self._restarts: dict[str, int] = {}
        self._replayed: dict[int, StepResult] = {}
        self._skipped = 0
        self.current = PolicyVersion(run.id, 0, 0)

    async def restore(self) -> int:
        """Bring trainer and servers to the folder's version; returns it, which is the open step's number.

        The last complete checkpoint is loaded, the stored batches after it are applied again in order,
        nothing is generated for them, and every server gets the result.
        """
        async with self._services.weights:
            await self._load_trainer()
            await self._sync(self._services.servers)
        for step, result in self._replayed.items():
            if not has_metrics(self._run, step):
                await store_metrics(self._run, step, result.metrics)
        return self.current.version

    async def train(self, step: int, digest: str) -> StepResult:
        """Apply a stored batch; a launched trainer that dies is brought back and goes on from the folder.

        Raises:
            SkippedStepsError: too many steps in a row made no update.
        """
        part = TrainPart(self._services.trainer.client, str(self._run.folder.root), self._run.id, digest)
        async with self._services.weights:
            try:
                result = await train_step(part, step)
            except DEATHS as error:
                await self._bring_back_trainer(error)
                result = self._replayed[step]
            self.current = replace(self.current, version=result.version)
        self._count_skipped(result)
        return result

    async def sync(self, result: StepResult) -> None:
        """Give every server the current version: its weights, or its number alone when no update was made."""
        async with self._services.weights:
            await self._sync(self._services.servers, only_number=not result.updated)

    async def checkpoint(self) -> None:
        """Write everything that makes up the current version into the run's folder."""
        version = self.current.version
        async with self._services.weights:
            try:
                await self._services.trainer.client.checkpoint(folder=str(self._run.folder.root), version=version)
            except DEATHS as error:
                await self._bring_back_trainer(error)
                await self._services.trainer.client.checkpoint(folder=str(self._run.folder.root), version=version)

    async def watch(self, server: ServerService) -> None:
        """For ever: wait until a server fails, and bring it back.

        Raises:
            ServiceDiedError: it cannot be brought back.
        """
        while True:
            reason = await server.failed()
            async with self._services.weights:
                if not await server.client.is_healthy():
                    await self._bring_back_server(server, reason)

    async def _load_trainer(self) -> None:
        run, client = self._run, self._services.trainer.client
        point = resume_point(run.folder)
        first = point.checkpoint_version or 0
        incarnation = run.store.next_incarnation()
        checkpoint = None if point.checkpoint_version is None else str(run.folder.checkpoint(first))
        folder = str(run.folder.root)
        await client.load(
            run=run.id, incarnation=incarnation, model=str(run.model), folder=folder, checkpoint=checkpoint, version=first
        )
        self._replayed = {}
        for step in range(first, point.stored_batches):
            digest = stored_digest(run.folder, step)
            self._replayed[step] = await client.train_step(folder=folder, run=run.id, step=step, digest=digest)
        self.current = PolicyVersion(run.id, incarnation, point.stored_batches)

    async def _sync(self, servers: tuple[ServerService, ...], *, only_number: bool = False) -> None:
        """Bring servers to the current version; one that fails half-way is started again."""
        sequences = stored_sequences(self._run.folder, self.current.version - 1, self._run.config.sync.parity_sequences)
        part = SyncPart(self._services.trainer.client, self.current, self._run.config.sync, sequences)
        ...

    async def _bring_back_trainer(self, error: Exception) -> None:
        """Start a launched trainer again and go on from the folder; `error` is raised when it has not died."""
        trainer = self._services.trainer
        if trainer.process is None or trainer.process.is_running:
            raise error
        await self._restart(trainer, str(error))
        await self._load_trainer()
        await self._sync(self._services.servers)

    async def _bring_back_server(self, server: ServerService, reason: str) -> None:
        self._run.pool.set_aside(server.client, reason)
        await self._restart(server, reason)
        await self._sync((server,))

    async def _restart(self, service: TrainerService | ServerService, reason: str) -> None:
        n = self._restarts[service.name] = self._restarts.get(service.name, 0) + 1
        self._run.progress.note(f"{service.name}: {reason.splitlines()[0]}; starting it again ({n})")
        await restart(service, reason, n, self._run.config.serve.max_restarts)

    def _count_skipped(self, result: StepResult) -> None:
        allowed = self._run.config.train.max_skipped_steps
        self._skipped = 0 if result.updated else self._skipped + 1
        if self._skipped > allowed:
            raise SkippedStepsError(
                f"{self._skipped} steps in a row made no update, train.max_skipped_steps allows {allowed}; "
                f"the reason of the last one: {result.reason}"
            )


@asynccontextmanager
async def open_policy(run: Run) -> AsyncIterator[Policy]:
    """Start the services of a run and watch over its servers while it goes on."""
    async with open_services(run.config, run.model, run.folder.logs) as services:
        policy = Policy(run, services)
        async with asyncio.TaskGroup() as watching:
            watches = [watching.create_task(policy.watch(server)) for server in services.servers]
            yield policy
            for watch in watches:
                watch.cancel()
