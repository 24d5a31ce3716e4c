"""The policy's version: brought up in trainer, servers and folder alike, moved on, brought back after a death."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from flows.evaluate import evaluate_version, is_due, is_evaluated
from flows.failure import one_error
from flows.policies.checkpointing import Checkpointing
from flows.policies.parity import AT_START, ratio_warning
from flows.policies.servers import Servers, servers_of
from flows.policies.services import ServerService, TrainerService, open_services, restart
from flows.policies.sync_report import SyncReport, sync_metrics
from flows.policies.trained import Trained
from flows.policies.watch import watch
from flows.reporting.report import has_metrics, store_metrics, train_metrics
from flows.running.run import Run, TrainingRun
from flows.running.space import is_checkpoint_due
from flows.ui.progress import say
from tasks.errors import RequestError, ServiceDiedError, SkippedStepsError
from tasks.observe.metrics import Metric
from tasks.observe.spans import OpenSpan, current_lane, span, spanned, within
from tasks.observe.waits import Lock
from tasks.serve.version import PolicyVersion
from tasks.store.deliveries import clear
from tasks.train.protocol import StepResult

Result = TypeVar("Result")


class Policy:
    """One run's policy, in trainer, servers and folder.

    Args:
        run: the run.
        trainer: its trainer.
        servers: those that sample; None for a run that samples nothing.
        checkpointing: follows the checkpoints that are being written.

    Attributes:
        trained: what the trainer stands at.
    """

    def __init__(
        self,
        run: TrainingRun,
        trainer: TrainerService,
        servers: Servers | None,
        checkpointing: Checkpointing,
    ) -> None:
        self._run, self._trainer, self._servers = run, trainer, servers
        self._checkpointing = checkpointing
        self._still = Lock()  # held while the trainer's weights move or travel
        self._restarts = self._restarts_at_checkpoint = 0
        self._skipped = 0
        self._recomputing = run.recomputing if isinstance(run, Run) else None
        self.trained = Trained(run, trainer.client)

    @spanned("restore")
    async def restore(self) -> int:
        """Bring trainer and servers to the folder's version; returns it, which is the open step's number.

        The last complete checkpoint is loaded, the stored batches after it are applied again in order,
        nothing is generated for them, and every server gets the result. A version on the way whose evaluation
        went on beside training when the run was ended is evaluated to the end. A checkpoint that is due of the
        folder's version is written, unless it is there: the run may have been ended just before.
        """
        async with self._still:
            with span("loading"):
                end = await self.trained.load_checkpoint()
        self._run.compactor.begin(self.trained.version)
        for step in range(self.trained.version, end):
            if self._servers and is_due(self._run, step):
                await self._evaluate_rest(self._servers.run, step)
            async with self._still:
                with span("train"):
                    await self.trained.replay(step)
        async with self._still:
            with span("sync"):
                reports = await self._bring_up()
        if self.trained.version == 0 and reports:
            differences = [Metric(AT_START, "all", "max", max(report.difference for report in reports))]
            await store_metrics(self._run, 0, differences)
        self._run.progress.begin(self.trained.version)
        self._run.artifacts.begin(self.trained.version)
        for step, result in self.trained.replayed.items():
            if not await asyncio.to_thread(has_metrics, self._run, step):
                await store_metrics(self._run, step, train_metrics(result))
        await self._run.store.writer.note()
        if self.trained.version:
            await self.checkpoint_if_due()
            await self.export_if_due()
        if self._recomputing:
            self._recomputing.begin(self.trained.version)
        return self.trained.version

    async def train(self, step: int, digest: str) -> StepResult:
        """Apply the stored batch of a step; a launched trainer that dies goes on from the folder.

        Raises:
            SkippedStepsError: too many steps in a row made no update.
        """
        async with self._still:
            await self.trained.complete(step)
            waited_s = await self._recomputing.end() if self._recomputing else 0.0
            try:
                result = await self._trained(step, digest)
            except ServiceDiedError as error:
                await self._bring_back_trainer(error)
                result = self.trained.replayed[step]
            self.trained.moved(result)
        _tell_skipped(step, result)
        if self._servers and (warning := ratio_warning(self._run.config, step, result.metrics)):
            say(warning)
        self._count_skipped(result)
        again = self._recomputing.metrics(result.metrics, waited_s) if self._recomputing else []
        return replace(result, metrics=[*result.metrics, *again])

    async def sync(self, *, only_name: bool) -> list[Metric]:
        """Give every server the current version: its weights, or its name alone when it has those already.

        A server that fails is brought back beside the steps; the others go on.
        """
        async with self._still:
            calls_before = self._servers.calls if self._servers else 0
            try:
                reports = await self._bring_up(only_name=only_name)
            except ServiceDiedError as error:
                if error.service != self._trainer.name:
                    raise
                reports = await self._bring_back_trainer(error)
        if self._recomputing:
            self._recomputing.begin(self.trained.version)
        calls = self._servers.calls - calls_before if self._servers else 0
        submitted = self._servers.submitted.metrics() if self._servers else []
        return [*sync_metrics(reports, calls), *submitted]

    @spanned("checkpoint")
    async def checkpoint_if_due(self) -> None:
        """Begin to write all that makes up the current version into the run's folder, now and then and at the end.

        Training is held while the state is copied. The steps below are compacted once the checkpoint is complete.

        Raises:
            StoreError: the last one could not be written.
        """
        if not is_checkpoint_due(self._run.config, self.trained.version):
            return
        await self.checkpointed()
        await self._checkpoint()

    async def checkpointed(self) -> None:
        """Wait until the checkpoint that was begun last is complete; one that its trainer took with it is begun anew.

        Raises:
            StoreError: it could not be written.
        """
        while error := await self._checkpointing.ended():
            async with self._still:  # another call may be bringing the trainer back
                if self._restarts == self._restarts_at_checkpoint:
                    if not isinstance(error, ServiceDiedError):
                        raise error
                    await self._bring_back_trainer(error)
            if is_checkpoint_due(self._run.config, self.trained.version):
                await self._checkpoint()

    async def tell_spans(self) -> None:
        """Have the ranks tell of their time until now; no command follows the last step that would bring that."""
        with suppress(RequestError, ServiceDiedError):  # its death costs these spans alone
            await self._trainer.client.tell_spans()

    @spanned("export")
    async def export_if_due(self) -> None:
        """Write the current version as a Hugging Face folder below the run's policies/, unless it is there.

        Raises:
            StoreError: it could not be written.
        """
        every, version = self._run.config.train.export_every, self.trained.version
        if not every or version % every:
            return
        async with self._still:
            await self._survived(
                lambda: self._trainer.client.store_policy(self._run.folder.location, version)
            )

    async def watch(self, servers: Servers, server: ServerService) -> None:
        """Watch over a server for ever; see flows.policies.watch."""
        with within(lane=f"watch {server.name}"):
            await watch(servers, server, self._run.config.serve, partial(self._rejoin, servers))

    async def _checkpoint(self) -> None:
        folder, version = self._run.folder.location, self.trained.version
        async with self._still:
            begun = await self._survived(lambda: self._trainer.client.checkpoint(folder, version))
            self._restarts_at_checkpoint = self._restarts
        await self._checkpointing.begun(version, begun)

    @spanned("rejoin")
    async def _rejoin(self, servers: Servers, server: ServerService) -> None:
        """Bring a server that answers again to the current version; once more when the trainer died of it."""
        restarts = self._restarts
        try:
            await servers.rejoin(server, self._hold)
        except ServiceDiedError as error:
            if error.service != self._trainer.name:
                raise
            async with self._still:
                if self._restarts == restarts:  # nobody else has brought it back meanwhile
                    await self._bring_back_trainer(error)
            await servers.rejoin(server, self._hold)

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[PolicyVersion]:
        async with self._still:
            yield self.trained.current

    async def _bring_up(self, *, only_name: bool = False) -> list[SyncReport]:
        """Give every server, if there are any, the current version; the trainer's weights are held still."""
        return (
            await self._servers.bring_up(self.trained.current, only_name=only_name) if self._servers else []
        )

    async def _evaluate_rest(self, run: Run, version: int) -> None:
        """Finish the evaluation of a version on the way, unless it is finished."""
        if not await asyncio.to_thread(is_evaluated, run, version):
            async with self._still:
                await self._bring_up()
            await evaluate_version(run, version)

    async def _trained(self, step: int, digest: str) -> StepResult:
        """What the trainer makes of a step's batch; what servers are compared on afterwards is read beside it."""
        with one_error():
            async with asyncio.TaskGroup() as group:
                if self._servers:
                    group.create_task(self._servers.prepare(replace(self.trained.current, version=step + 1)))
                training = group.create_task(self.trained.train(step, digest))
        return training.result()

    async def _survived(self, command: Callable[[], Awaitable[Result]]) -> Result:
        """What a command returns; given once more when the trainer died of it, with the weights held still."""
        try:
            return await command()
        except ServiceDiedError as error:
            if error.service != self._trainer.name:
                raise
            await self._bring_back_trainer(error)
            return await command()

    async def _bring_back_trainer(self, error: ServiceDiedError) -> list[SyncReport]:
        """Start a launched trainer again, go on from the folder, and bring the servers to it."""
        await restart(self._trainer, error.reason, self._restarts, self._run.config.serve.max_restarts)
        self._restarts += 1
        await self.trained.load()
        return await self._bring_up()

    def _count_skipped(self, result: StepResult) -> None:
        allowed = self._run.config.train.max_skipped_steps
        self._skipped = 0 if result.updated else self._skipped + 1
        if self._skipped > allowed:
            raise SkippedStepsError(
                f"{self._skipped} steps in a row made no update, train.max_skipped_steps allows {allowed}; "
                f"the reason of the last one: {result.reason}"
            )


def _tell_skipped(step: int, result: StepResult) -> None:
    """Say of a step that it made no update, or not all of them, and why."""
    n_skipped = sum(each.value for each in result.metrics if each.name == "train/skipped_updates")
    if not result.updated:
        say(f"step {step}: no update was made: {result.reason}")
    elif n_skipped:
        say(f"step {step}: {n_skipped:g} updates were skipped: a loss or a gradient was not finite")


@asynccontextmanager
async def open_policy(run: TrainingRun) -> AsyncIterator[Policy]:
    """Start the services of a run, and watch over its servers while it goes on; without sampling the trainer alone."""
    is_sampling, opening = isinstance(run, Run), OpenSpan("opening").begin(current_lane())
    await asyncio.to_thread(clear, run.store.files)
    say(f"bringing up the trainer{' and the vLLM servers' if is_sampling else ''}")
    opened = open_services(run.config, run.model, run.folder.logs, with_servers=is_sampling)
    async with opened as (trainer, services), Checkpointing(run, trainer.client) as checkpointing:
        servers = (
            await asyncio.to_thread(servers_of, run, trainer.client, services)
            if isinstance(run, Run)
            else None
        )
        policy = Policy(run, trainer, servers, checkpointing)
        try:
            async with asyncio.TaskGroup() as watching:
                watches = [watching.create_task(policy.watch(servers, each)) for each in services if servers]
                if isinstance(run, Run) and run.recomputing is not None:
                    watches.append(watching.create_task(run.recomputing.work(policy.trained.score)))
                opening.end()
                yield policy
                for watch in watches:
                    watch.cancel()
        finally:
            if servers:
                await servers.clear()
