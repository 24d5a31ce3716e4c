"""The phases of a step after its generation, by the functions that a run goes through, one by one or all together."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from prefect.logging import get_run_logger

from flows.groups.fan_out import Collected, store_batch
from flows.groups.group import GroupCollection, StepCollection, is_shown, judged
from flows.replaying.stored_step import SampledStep
from flows.reporting.report import report_step, train_metrics
from flows.running.failures import FailureWatch
from flows.running.run import Run
from tasks.observe.step_clock import StepClock
from tasks.score.outcome import GroupOutcome
from tasks.score.part import ScorePart
from tasks.score.scoring import scorable
from tasks.store.deliveries import take_in
from tasks.store.rows import Rows, no_rows, values
from tasks.store.step import GroupPlan
from tasks.train.client import TrainerClient
from tasks.train.protocol import StepResult
from tasks.train.task import train_step

Phase = Callable[[], Awaitable[None]]
ALL_FAIL = 1.0
"""Share of trajectories that may have failed: the step was gone on with."""


class AfterGeneration:
    """A step whose trajectories are sampled, in a run to which nothing of it has been stored.

    Args:
        run: open; nothing is sampled, so that it needs no server.
        sampled: the step.
        trainer: stands at the step; None to leave out what needs one.

    Attributes:
        digest: of the batch, once that is stored.
    """

    def __init__(self, run: Run, sampled: SampledStep, trainer: TrainerClient | None) -> None:
        self.digest = ""
        self._run, self._sampled, self._trainer = run, sampled, trainer
        n = sum(group.rollouts.num_rows for group in sampled.groups)
        failures = FailureWatch(sampled.step, n, ALL_FAIL, logger=get_run_logger)
        self._collection = StepCollection(run, sampled.step, failures)
        self._scores: dict[int, Rows] = {}
        self._outcomes: list[GroupOutcome] = []
        self._result: StepResult | None = None
        self._started = time.perf_counter()

    def one_by_one(self) -> Mapping[str, Phase]:
        """The phases by name, in order; each needs those before it."""
        phases: dict[str, Phase] = {
            "storing": lambda: self._each(self._store),
            "scoring": lambda: self._each(self._score),
            "recording": lambda: self._each(self._record),
            "judging": lambda: self._each(self._judge),
            "batch": self._batch,
        }
        if self._trainer is not None:
            phases |= {"training": self._train, "taking in": self._take_in, "weights": self._weights}
        return phases | {"reporting": self._report}

    async def together(self) -> None:
        """All phases as in a step: each group's rows are stored, scored and judged side by side with the others'."""
        await self._each(self._collect)
        await self._batch()
        if self._trainer is not None:
            await self._train()
            await self._take_in()
            await self._weights()
        await self._report()

    @property
    def read_s(self) -> float | None:
        """Seconds of the training that the trainer read the batch's rows; None before, and without one."""
        metrics = self._result.metrics if self._result else ()
        return next((each.value for each in metrics if each.name == "train/handing_over_s"), None)

    async def _each(self, work: Callable[[GroupPlan], Awaitable[None]]) -> None:
        """Do something with all groups side by side, each begun one turn of the loop after the one before."""
        async with asyncio.TaskGroup() as groups:
            for group in self._sampled.groups:
                groups.create_task(_awaited(work(group)))
                await asyncio.sleep(0)

    async def _store(self, group: GroupPlan) -> None:
        """Hand each trajectory to the writer by itself, as it came, and wait until all are stored."""
        await asyncio.gather(*self._handed(group))

    def _handed(self, group: GroupPlan) -> list[Awaitable[None]]:
        handed: list[Awaitable[None]] = []
        for place, trajectory in enumerate(values(group.rollouts, "trajectory_id")):
            for dataset, rows in self._sampled.beside.get(str(trajectory), {}).items():
                handed.append(self._collection.keep_beside(dataset, rows))
            handed.append(self._collection.keep_rollouts(group.rollouts.slice(place, 1)))
        return handed

    async def _score(self, group: GroupPlan) -> None:
        """Score a group, and store its scores."""
        survivors = scorable(group.rollouts)
        self._scores[group.group] = no_rows("scores")
        if not survivors.num_rows or (
            self._run.scoring.by_group and not is_shown(self._run.config, survivors)
        ):
            return
        part = ScorePart(self._run.scoring, survivors, self._sampled.step, self._collection.keep_scores)
        await part.score()
        await asyncio.gather(*part.acknowledgements)
        self._scores[group.group] = part.rows

    async def _record(self, group: GroupPlan) -> None:
        """Record a group that does nothing in Prefect, as `observe.task_runs` asks for."""
        step, picture = self._sampled.step, self._run.picture

        async def work() -> None:
            await picture.rollout(_Nothing(), step, group.group)
            await picture.score(_Nothing(), step, group.group)

        await picture.group(work, step, group.group)

    async def _judge(self, group: GroupPlan) -> None:
        scores = self._scores[group.group]
        self._outcomes += await judged(self._run, self._sampled.step, group, group.rollouts, scores, 0.0)

    async def _collect(self, group: GroupPlan) -> None:
        """As a group goes on from where its last trajectory was sampled."""
        handed = self._handed(group)
        self._outcomes += await GroupCollection(self._collection, group).collect()
        await asyncio.gather(*handed)

    async def _batch(self) -> None:
        seconds = time.perf_counter() - self._started
        few_left_ns = self._collection.few_left_ns
        self._collected = Collected(self._sampled.step, self._outcomes, seconds, few_left_ns)
        self.digest = await store_batch(self._run, self._collected)

    async def _train(self) -> None:
        assert self._trainer is not None
        run = self._run
        self._result = await train_step(
            self._trainer, run.folder.location, run.id, self._sampled.step, self.digest
        )

    async def _take_in(self) -> None:
        """Store what the trainer has handed over: annotations, log-probabilities."""
        store = self._run.store
        for delivery in self._result.deliveries if self._result else ():
            await take_in(store.folder, store.files, store.writer, delivery)

    async def _weights(self) -> None:
        """The trainer's half of a sync by files: its weights, written for servers to read."""
        assert self._trainer is not None
        folder = self._run.folder.local / "weights"
        await self._trainer.write_weights(str(folder), self._sampled.step + 1)

    async def _report(self) -> None:
        metrics = train_metrics(self._result) if self._result else []
        await report_step(self._run, self._collected, metrics, StepClock(self._sampled.step))


class _Nothing:
    """Stands for a part of a group whose work is none."""

    async def sample(self) -> str:
        return ""

    async def score(self) -> str:
        return ""


async def _awaited(work: Awaitable[None]) -> None:
    await work
