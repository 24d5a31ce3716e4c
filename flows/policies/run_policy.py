"""The version of a run's policy in trainer, servers and folder: restored, trained, synced, and recovered after a crash."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollmill.flows.failure import one_error
from rollmill.flows.policies.checkpointing import Checkpointing
from rollmill.flows.policies.server_parity import AT_START, AT_START_MEAN, ServedRun, ratio_warning
from rollmill.flows.policies.server_watch import WatchLimits, watch_server
from rollmill.flows.policies.services import ServerService, TrainerService, open_services, restart
from rollmill.flows.policies.sync_report import SyncReport, sync_metrics
from rollmill.flows.policies.trainer_state import TrainerState
from rollmill.flows.policies.weight_sync import WeightSync
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.live_run import Run, TrainingRun
from rollmill.flows.step.held_out import evaluate_version, is_due, is_evaluated
from rollmill.flows.step.report import count_skipped_steps, has_metrics, store_metrics, train_metrics
from rollmill.flows.step.step_space import is_checkpoint_due
from rollmill.tasks.errors import RequestError, ServiceDiedError, ServiceStartError, SkippedStepsError
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.span_waits import TimedLock
from rollmill.tasks.observe.spans import OpenSpan, current_lane, record_span, span, within
from rollmill.tasks.score.group_outcomes import RolloutOrigin
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.store.staged_rows import remove_staged_rows
from rollmill.tasks.sync.task import SyncedVersion
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import BeginCheckpoint, ReportSpans, StorePolicy

Result = TypeVar("Result")


class RunPolicy:
    """Keeps the policy of a run at the same version in trainer, servers and the run's folder between two steps.

    Args:
        run: the run.
        trainer: its trainer.
        servers: its servers; None for a run that samples nothing.
        checkpointing: waits for checkpoints that are being written.

    Attributes:
        trained: the trainer's version.
    """

    def __init__(
        self,
        run: TrainingRun,
        trainer: TrainerService,
        servers: WeightSync | None,
        checkpointing: Checkpointing,
    ) -> None:
        self._run, self._trainer, self._servers = run, trainer, servers
        self._checkpointing = checkpointing
        # Held while the trainer's weights change or are sent.
        self._still = TimedLock()
        self._restarts = self._restarts_at_checkpoint = self._restarts_in_a_row = 0
        self._skipped = 0
        self._recomputing = run.recomputing if isinstance(run, Run) else None
        self.trained = TrainerState(run, trainer.client)

    @record_span("restore")
    async def restore(self) -> int:
        """Bring trainer and servers to the last version in the run's folder; returns it: the number of the next step.

        Loads the last complete checkpoint, trains again on the stored batches after it, without sampling, and syncs every
        server. An unfinished evaluation of a version on the way is finished, and a checkpoint that is due is written. A launched trainer
        that dies meanwhile is restarted.
        """
        self._run.recording.count_start()
        while True:
            try:
                reports = await self._restore_version()
                break
            except ServiceDiedError as error:
                if error.service != self._trainer.name:
                    raise
                async with self._still:
                    await self._restart_trainer(error.reason)
        if self.trained.version == 0 and reports:
            found = [report.differences for report in reports]
            differences = [
                Metric(AT_START, "all", "max", max(each.largest for each in found)),
                Metric(AT_START_MEAN, "all", "mean", max(each.mean for each in found)),
            ]
            await store_metrics(self._run, 0, differences)
        self._run.progress.begin(self.trained.version)
        self._run.artifacts.begin(self.trained.version)
        for step, result in self.trained.replayed.items():
            if not await asyncio.to_thread(has_metrics, self._run, step):
                await store_metrics(self._run, step, train_metrics(result))
        await self._run.store.writer.note()
        self._skipped = await asyncio.to_thread(count_skipped_steps, self._run, self.trained.version)
        if self.trained.version:
            await self.checkpoint_if_due()
            await self.export_if_due()
        if self._recomputing:
            self._recomputing.begin(self.trained.version)
        return self.trained.version

    async def _restore_version(self) -> list[SyncReport]:
        """Load the last checkpoint, train on the batches after it, and sync every server; returns the reports of the last sync."""
        async with self._still:
            with span("loading"):
                end = await self.trained.load_checkpoint()
        self._run.compactor.begin(self.trained.version)
        for step in range(self.trained.version, end):
            run = self._run
            # Its weights are lost once the step is trained again, so the rest of its evaluation is impossible.
            lacks_evaluation = is_due(run, step) and not await asyncio.to_thread(is_evaluated, run, step)
            if isinstance(run, Run) and lacks_evaluation:
                async with self._still:
                    await self._update_servers()
                await evaluate_version(run, step)
            async with self._still:
                with span("train"):
                    await self.trained.replay(step)
        async with self._still:
            with span("sync"):
                return await self._update_servers()

    async def score_ahead(self, step: int, trajectory_ids: Sequence[str], origin: RolloutOrigin) -> None:
        """Have the trainer compute the current version's log-probabilities of another run's rollouts that a later step trains on.

        What is stored is not computed again.
        """
        async with self._still:
            await self._retry_after_restart(lambda: self.trained.score(step, trajectory_ids, origin))

    async def train(self, step: int, digest: str) -> StepResult:
        """Train on the stored batch of a step; a launched trainer that dies is restarted and trained from the run's folder.

        Raises:
            SkippedStepsError: too many steps in a row made no update.
        """
        self._run.recording.count_start()
        async with self._still:
            await self.trained.complete(step)
            # The trainer cannot train while it computes log-probabilities of a bundle.
            waited_s = await self._recomputing.end() if self._recomputing else 0.0
            try:
                result = await self._train_and_prepare(step, digest)
                self._restarts_in_a_row = 0
            except ServiceDiedError as error:
                # An evaluation may be sampling the version before: the servers get this one at the sync, which waits for it.
                await self._bring_back_trainer(error, updates_servers=False)
                # The batch was stored before training, so the restart has trained on it already.
                result = self.trained.replayed[step]
            self.trained.advance_version(result)
        if self._servers and (warning := ratio_warning(self._run.config, step, result.metrics)):
            say(warning)
        self._note_skipped(step, result)
        again = self._recomputing.metrics(result.metrics, waited_s) if self._recomputing else []
        return replace(result, metrics=[*result.metrics, *again])

    async def sync(self, *, only_name: bool) -> list[Metric]:
        """Send every server the trainer's weights, or only the new version's name if they have not changed; returns metrics.

        A server that fails is brought back in the background; the others continue.
        """
        self._run.recording.count_start()
        async with self._still:
            calls_before = self._servers.calls if self._servers else 0
            try:
                reports = await self._update_servers(only_name=only_name)
            except ServiceDiedError as error:
                if error.service != self._trainer.name:
                    raise
                reports = await self._bring_back_trainer(error)
        if self._recomputing:
            self._recomputing.begin(self.trained.version)
        calls = self._servers.calls - calls_before if self._servers else 0
        submitted = self._servers.submitted.metrics() if self._servers else []
        return [*sync_metrics(reports, calls), *submitted]

    @record_span("checkpoint")
    async def checkpoint_if_due(self) -> None:
        """Begin a checkpoint of the current version if one is due; it is written in the background.

        Training waits while the state is copied. The steps before it are compacted once the checkpoint is complete.

        Raises:
            StoreError: the checkpoint before could not be written.
        """
        if not is_checkpoint_due(self._run.config, self.trained.version):
            return
        await self.finish_checkpoints()
        await self._checkpoint()

    async def finish_checkpoints(self) -> None:
        """Wait until the last checkpoint is complete; one that was lost with its trainer is begun again.

        Raises:
            StoreError: it could not be written.
        """
        while error := await self._checkpointing.wait_until_written():
            # Another call may be restarting the trainer.
            async with self._still:
                # Otherwise another call has restarted the trainer, and the checkpoint was lost with the one before.
                if self._restarts == self._restarts_at_checkpoint:
                    if not isinstance(error, ServiceDiedError):
                        raise error
                    await self._bring_back_trainer(error)
            if is_checkpoint_due(self._run.config, self.trained.version):
                await self._checkpoint()

    async def report_spans(self) -> None:
        """Have the trainer send its ranks' spans up to now, after the last step; an unreachable trainer is ignored."""
        # If the trainer has ended, only these spans are lost.
        with suppress(RequestError, ServiceDiedError):
            await self._trainer.client.do(ReportSpans())

    @record_span("export")
    async def export_if_due(self) -> None:
        """Export the current version as a Hugging Face folder below the run's policies/, if that is due.

        Raises:
            StoreError: it could not be written.
        """
        every, version = self._run.config.checkpoint.export_every, self.trained.version
        if not every or version % every:
            return
        async with self._still:
            await self._retry_after_restart(
                lambda: self._trainer.client.do(
                    StorePolicy(folder=self._run.folder.location, version=version)
                )
            )

    async def watch(self, servers: WeightSync, server: ServerService) -> None:
        """Bring a server back whenever it fails, until the run ends."""
        with within(lane=f"watch {server.name}"):
            await watch_server(
                servers, server, WatchLimits(self._run.config.max_restarts), partial(self._rejoin, servers)
            )

    async def _checkpoint(self) -> None:
        folder, version = self._run.folder.location, self.trained.version
        async with self._still:
            begun = await self._retry_after_restart(
                lambda: self._trainer.client.do(BeginCheckpoint(folder=folder, version=version))
            )
            self._restarts_at_checkpoint = self._restarts
        await self._checkpointing.track(version, begun)

    @record_span("rejoin")
    async def _rejoin(self, servers: WeightSync, server: ServerService) -> None:
        """Give a server that answers again the current version; if the trainer dies meanwhile, restart it and try again."""
        restarts = self._restarts
        try:
            await servers.rejoin(server, self._hold)
        except ServiceDiedError as error:
            if error.service != self._trainer.name:
                raise
            async with self._still:
                # Unless another call has restarted it meanwhile.
                if self._restarts == restarts:
                    await self._bring_back_trainer(error)
            await servers.rejoin(server, self._hold)

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[PolicyVersion]:
        async with self._still:
            yield self.trained.current

    async def _update_servers(self, *, only_name: bool = False) -> list[SyncReport]:
        """Give every server, if there are any, the current version; the caller holds the lock on the trainer's weights."""
        return await self._servers.update(self.trained.current, only_name=only_name) if self._servers else []

    async def _train_and_prepare(self, step: int, digest: str) -> StepResult:
        """Train on the batch of a step, and have trainer and servers score tokens with the old weights, for the next sync."""
        servers, following = self._servers, replace(self.trained.current, version=step + 1)
        if servers:
            await servers.parity.note_trainer_before(following)
        if servers and self._run.config.serve.sleep:
            # Asleep, they score nothing.
            await servers.note_servers_before(following)
            await servers.sleep()
            return await self.trained.train(step, digest)
        with one_error():
            async with asyncio.TaskGroup() as group:
                scoring = group.create_task(servers.note_servers_before(following)) if servers else None
                result = await self.trained.train(step, digest)
                if scoring:
                    # A busy server must not delay the sync.
                    scoring.cancel()
        return result

    async def _retry_after_restart(self, command: Callable[[], Awaitable[Result]]) -> Result:
        """Run a command; if the trainer dies, restart it and run the command again.

        The caller holds the lock on the trainer's weights.
        """
        try:
            return await command()
        except ServiceDiedError as error:
            if error.service != self._trainer.name:
                raise
            await self._bring_back_trainer(error)
            return await command()

    async def _bring_back_trainer(
        self, error: ServiceDiedError, *, updates_servers: bool = True
    ) -> list[SyncReport]:
        """Restart a launched trainer, load the last version in the run's folder, and sync the servers; returns their reports.

        A trainer that fails meanwhile is restarted again.
        """
        reason = error.reason
        while True:
            await self._restart_trainer(reason)
            try:
                await self.trained.load()
                return await self._update_servers() if updates_servers else []
            except ServiceDiedError as died:
                if died.service != self._trainer.name:
                    raise
                reason = died.reason

    async def _restart_trainer(self, reason: str) -> None:
        """Restart a launched trainer; one that fails to start is restarted again, at most `max_restarts` times in a row.

        Raises:
            ServiceDiedError: it may not be restarted any more.
        """
        while True:
            earlier, self._restarts_in_a_row = self._restarts_in_a_row, self._restarts_in_a_row + 1
            try:
                await restart(self._trainer, reason, earlier, self._run.config.max_restarts)
            except ServiceStartError as failed:
                reason = failed.reason
                continue
            self._restarts += 1
            return

    def _note_skipped(self, step: int, result: StepResult) -> None:
        """Log that a step made no update or skipped some; SkippedStepsError after too many steps in a row without an update."""
        allowed = self._run.config.train.max_skipped_steps
        n_skipped = sum(each.value for each in result.metrics if each.name == "train/skipped_updates")
        if result.updated:
            self._skipped = 0
            if n_skipped:
                say(f"step {step}: {n_skipped:g} updates were skipped: a loss or a gradient was not finite")
            return
        say(f"step {step}: no update was made: {result.reason}")
        self._skipped += 1
        if self._skipped > allowed:
            raise SkippedStepsError(
                f"{self._skipped} steps in a row made no update, train.max_skipped_steps allows {allowed}; "
                f"the reason of the last one: {result.reason}; change what causes it, or raise train.max_skipped_steps, and resume"
            )


@task(name="restore", task_run_name="restore", cache_policy=NO_CACHE, persist_result=False, retries=0)
async def restore_policy(policy: RunPolicy) -> SyncedVersion:
    """Bring trainer and servers to the last version in the run's folder."""
    version = await policy.restore()
    if version:
        say(f"resuming at step {version}, with policy version {version}")
    return SyncedVersion(version, ())


@asynccontextmanager
async def open_policy(run: TrainingRun) -> AsyncIterator[RunPolicy]:
    """Start the trainer of a run and, if it samples, its servers, which are watched until the block ends."""
    is_sampling, opening = isinstance(run, Run), OpenSpan("opening").begin(current_lane())
    # A killed trainer may have left staged rows, which are never ingested: its steps are trained again.
    await asyncio.to_thread(remove_staged_rows, run.store.files)
    say(f"starting the trainer{' and the vLLM servers' if is_sampling else ''}")
    opened = open_services(run.config, run.model, run.folder.logs, with_servers=is_sampling)
    async with opened as (trainer, services):
        servers = (
            await asyncio.to_thread(WeightSync, ServedRun.of(run), trainer.client, services)
            if isinstance(run, Run)
            else None
        )
        try:
            async with asyncio.TaskGroup() as watching:
                policy = RunPolicy(run, trainer, servers, Checkpointing(run, trainer.client, watching))
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
