"""The phases of a step after its rollouts, by the functions of a real run: one by one, or all together."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping

from prefect.logging import get_run_logger

from rollmill.flows.offline.stored_step import SampledStep
from rollmill.flows.run.executor.local_executor import LocalExecutor
from rollmill.flows.run.live_run import Run
from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.flows.step.report import report_step, train_metrics
from rollmill.flows.step.step_collection import (
    CollectedStep,
    GroupCollection,
    StepCollection,
    is_scorable_group,
)
from rollmill.flows.step.step_groups import store_batch, store_group_outcomes
from rollmill.tasks.observe.step_clock import StepClock
from rollmill.tasks.rollout.task import SampledChunk
from rollmill.tasks.score.group_outcomes import GroupOutcome
from rollmill.tasks.score.scoring import select_scorable
from rollmill.tasks.score.task import ScoreChunk, ScoredChunk
from rollmill.tasks.store.rows import Rows, column_values, no_rows
from rollmill.tasks.store.run.step_plan import GroupPlan
from rollmill.tasks.store.staged_rows import ingest_rows
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import TrainStep, WriteWeights
from rollmill.tasks.train.service.trainer_client import TrainerClient

Phase = Callable[[], Awaitable[None]]
# Share of trajectories that may have failed: the stored step was finished although some had.
ALL_FAIL = 1.0


class StepPhases:
    """Runs what follows the rollouts of a step, from storing to reporting, in a run that has stored nothing of the step.

    Args:
        run: open; it needs no server, since nothing is sampled.
        sampled: the step.
        trainer: at the step's version; None to leave out the phases that need one.

    Attributes:
        digest: of the batch, once it is stored.
    """

    def __init__(self, run: Run, sampled: SampledStep, trainer: TrainerClient | None) -> None:
        self.digest = ""
        self._run, self._sampled, self._trainer = run, sampled, trainer
        n = sum(group.rollouts.num_rows for group in sampled.groups)
        failures = FailureWatch(sampled.step, n, ALL_FAIL, logger=get_run_logger)
        self._collection = StepCollection(run, sampled.step, failures)
        local = LocalExecutor(run.id, run.config, run.environments, run.admission, run.store.writer)
        self._rows = local.begin_step(sampled.step, failures.see)
        self._scores: dict[int, Rows] = {}
        self._outcomes: list[GroupOutcome] = []
        self._result: StepResult | None = None
        self._started = time.perf_counter()

    def list_phases(self) -> Mapping[str, Phase]:
        """Return the phases as functions by name, in order; each needs the results of the ones before it."""
        phases: dict[str, Phase] = {
            "storing": lambda: self._each(self._store),
            "scoring": lambda: self._each(self._score),
            "recording": lambda: self._each(self._record),
            "advantages": lambda: self._each(self._compute_advantages),
            "batch": self._batch,
        }
        if self._trainer is not None:
            phases |= {"training": self._train, "ingesting": self._ingest, "weights": self._weights}
        return phases | {"reporting": self._report}

    async def run_together(self) -> None:
        """Run all phases as in a real step: the groups are stored and scored concurrently, then the batch is trained."""
        await self._each(self._collect)
        await self._batch()
        if self._trainer is not None:
            await self._train()
            await self._ingest()
            await self._weights()
        await self._report()

    @property
    def read_s(self) -> float | None:
        """Seconds for which the trainer read the batch's rows; None before training, and without a trainer."""
        metrics = self._result.metrics if self._result else ()
        return next((each.value for each in metrics if each.name == "train/reading_batch_s"), None)

    async def _each(self, work: Callable[[GroupPlan], Coroutine[None, None, None]]) -> None:
        """Call `work` for all groups of the step concurrently, and wait for all calls."""
        async with asyncio.TaskGroup() as groups:
            for group in self._sampled.groups:
                groups.create_task(work(group))
                # Prefect's work for a task run blocks the loop: let others run in between.
                await asyncio.sleep(0)

    async def _store(self, group: GroupPlan) -> None:
        """Append each trajectory of a group to the data sets separately, as in a real step, and wait until all are stored."""
        await asyncio.gather(*self._append_rollouts(group))

    def _append_rollouts(self, group: GroupPlan) -> list[Awaitable[None]]:
        handed: list[Awaitable[None]] = []
        for place, trajectory in enumerate(column_values(group.rollouts, "trajectory_id")):
            if (routing := self._sampled.routing.get(str(trajectory))) is not None:
                handed.append(self._rows.store_related("", "routing", routing))
            row = group.rollouts.slice(place, 1)
            handed.append(self._rows.store_rollouts(row))
            self._collection.failures.see(row)
        return handed

    async def _score(self, group: GroupPlan) -> None:
        """Score a group, and store its scores."""
        survivors = select_scorable(group.rollouts)
        self._scores[group.group] = no_rows("scores")
        scoring = self._run.environment_of(group.group).scoring
        if not survivors.num_rows or (
            scoring.by_group and not is_scorable_group(self._run.config, survivors)
        ):
            return
        chunk = ScoreChunk(scoring, [survivors], self._sampled.step, self._rows.store_scores)
        scored = await chunk.score()
        await asyncio.gather(*scored.acknowledgements)
        self._scores[group.group] = scored.rows

    async def _record(self, group: GroupPlan) -> None:
        """Record task runs for a group in Prefect that do no work, in the way that `observe.task_runs` selects."""
        step, recorder, label = self._sampled.step, self._run.task_runs, str(group.group)
        await self._run.recording.hold_back()
        async with recorder.watch_group(step, group.group, {}):
            async with recorder.rollout(_EmptyChunk(), step, label) as rolled:
                rolled.done(await rolled.work())
            async with recorder.score(_EmptyChunk(), step, label, after=[rolled]) as scored:
                scored.done(await scored.work())

    async def _compute_advantages(self, group: GroupPlan) -> None:
        scores = self._scores[group.group]
        self._outcomes += await store_group_outcomes(
            self._run, self._sampled.step, group, group.rollouts, scores, 0.0
        )

    async def _collect(self, group: GroupPlan) -> None:
        """Store a group's sampled trajectories, score them and compute advantages, as a real step does after sampling."""
        handed = self._append_rollouts(group)
        await GroupCollection(self._collection, group).collect()
        await asyncio.gather(*handed)

    async def _batch(self) -> None:
        seconds = time.perf_counter() - self._started
        outcomes = [*self._outcomes, *self._collection.outcomes]
        self._collected = CollectedStep(self._sampled.step, outcomes, seconds, self._collection.few_left_ns)
        self.digest = await store_batch(self._run, self._sampled.step, outcomes)

    async def _train(self) -> None:
        assert self._trainer is not None
        run = self._run
        self._result = await self._trainer.do(
            TrainStep(folder=run.folder.location, run_id=run.id, step=self._sampled.step, digest=self.digest)
        )

    async def _ingest(self) -> None:
        """Store the rows that the trainer has staged: annotations and log-probabilities of tokens."""
        store = self._run.store
        for staged in self._result.staged if self._result else ():
            await ingest_rows(store.folder, store.files, store.writer, staged)

    async def _weights(self) -> None:
        """Have the trainer write its weights as files for servers to read: the trainer's half of a weight sync by files."""
        assert self._trainer is not None
        folder = self._run.folder.local / "weights"
        await self._trainer.do(WriteWeights(folder=str(folder), version=self._sampled.step + 1))

    async def _report(self) -> None:
        metrics = train_metrics(self._result) if self._result else []
        await report_step(self._run, self._collected, metrics, StepClock(self._sampled.step))


class _EmptyChunk:
    """A chunk of a group for task runs that do no work: it samples no rollouts and gives no scores."""

    async def sample(self) -> SampledChunk:
        return SampledChunk(no_rows("rollouts"), ())

    async def score(self) -> ScoredChunk:
        return ScoredChunk(no_rows("scores"))
