"""One group on its way: sampled in parts, each scored the moment it is there, then judged."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress

from flows.config import RunConfig
from flows.groups.collecting import Collecting
from flows.running.failures import FailureWatch
from flows.running.run import Run
from tasks.observe.spans import span, within
from tasks.rollout.admission import ROLLOUT, Place
from tasks.rollout.group import GroupClock, RolloutPart, StepSampler, group_work, parts_of
from tasks.rollout.trajectory import Work
from tasks.score.outcome import GroupOutcome, group_rows, judge_group, survivors_of
from tasks.score.part import ScorePart
from tasks.score.scoring import scorable
from tasks.store.rows import Rows, in_order, joined, values, where
from tasks.store.step import GroupPlan


class StepCollection:
    """What the groups of one step share: how they sample, what fails, and how far they are.

    Attributes:
        begun_ns: when the last of its trajectories so far was let begin, by `time.perf_counter_ns`.
        ended_ns: when each group was over, those that are.
    """

    def __init__(self, run: Run | Collecting, step: int, failures: FailureWatch) -> None:
        self.run, self.step, self.failures = run, step, failures
        self.begun_ns = 0
        self.ended_ns: list[int] = []
        self.sampler = StepSampler(
            player=run.player,
            admission=run.admission,
            run=run.id,
            step=step,
            keep=self._store_rollouts,
            keep_beside=self.keep_beside,
            keeps_routing=run.config.rollout.keep_routing,
            see_lost=failures.see,
        )

    def group_over(self, places: Sequence[Place]) -> None:
        """Note that a group is over, and when its trajectories could begin."""
        self.begun_ns = max(self.begun_ns, *(place.granted_ns for place in places), 0)
        self.ended_ns.append(time.perf_counter_ns())

    @property
    def few_left_ns(self) -> int:
        """Since when less than half of its groups went on, and none of its trajectories waited for a slot.

        Known when all are over.
        """
        ended = sorted(self.ended_ns)
        return max(self.begun_ns, ended[len(ended) // 2]) if ended else 0

    def keep_rollouts(self, rows: Rows) -> Awaitable[None]:
        """Hand rollouts that were sampled elsewhere to the writer, and look for failures among them."""
        stored = self._store_rollouts(rows)
        self.failures.see(rows)
        return stored

    def _store_rollouts(self, rows: Rows) -> Awaitable[None]:
        return self.run.writer.append("rollouts", rows, step=self.step)

    def keep_beside(self, dataset: str, rows: Rows) -> Awaitable[None]:
        """Hand rows that belong to rollouts to the writer: routed experts, states."""
        env = {"env": self.run.environment.name} if dataset == "states" else {}
        return self.run.writer.append(dataset, rows, **env, step=self.step)

    def keep_scores(self, rows: Rows) -> Awaitable[None]:
        """Hand scores to the writer."""
        stored = self.run.writer.append("scores", rows, scorer=self.run.scoring.key, step=self.step)
        self.failures.see(rows)
        return stored


class GroupCollection:
    """One group of a step, from where its plan says that it stands."""

    def __init__(self, collection: StepCollection, plan: GroupPlan) -> None:
        self._run, self._step, self._group = collection.run, collection.step, plan.group
        self._collection, self._plan = collection, plan
        self._rollouts, self._scores = [plan.rollouts], [plan.scores]
        self._acknowledgements: list[Awaitable[None]] = []

    async def collect(self) -> tuple[GroupOutcome, ...]:
        """Sample what is missing, score what is unscored, wait until all of it is stored, and judge it."""
        with within(lane=str(self._group)):
            return await self._collected()

    async def _collected(self) -> tuple[GroupOutcome, ...]:
        run = self._run
        with span("environment"):
            work = await self._missing()
        unscored = scorable(self._plan.to_score)
        self._hand_to_trainer(self._plan.rollouts)
        with run.admission.places(len(work), (self._step, ROLLOUT)) as places:
            if places:
                await places[0].turn()

            async def collect() -> tuple[GroupOutcome, ...]:
                return await self._collect(work, places, unscored)

            is_done = not work and not unscored.num_rows
            try:
                return await (collect() if is_done else run.picture.group(collect, self._step, self._group))
            finally:
                self._collection.group_over(places)

    async def _collect(
        self, work: Sequence[Work], places: Sequence[Place], unscored: Rows
    ) -> tuple[GroupOutcome, ...]:
        started, config = time.perf_counter(), self._run.config.rollout
        clock = GroupClock(config.group_timeout_s)
        clock.deadline()
        parts = parts_of(work, config.trajectories_per_task)
        places_of_parts = parts_of(places, config.trajectories_per_task)
        async with asyncio.TaskGroup() as fan_out:
            for number, (part, part_places) in enumerate(zip(parts, places_of_parts, strict=True)):
                label = number if len(parts) > 1 else None
                fan_out.create_task(self._sample(part, part_places, clock, label))
                await asyncio.sleep(0)
            if unscored.num_rows and not self._run.scoring.by_group:
                fan_out.create_task(self._score(unscored, len(parts) if parts else None))
        if self._run.scoring.by_group:
            await self._score_group()
        with span("storing"):
            await asyncio.gather(*self._acknowledgements)
        return await self._judge(time.perf_counter() - started)

    async def _sample(
        self, work: Sequence[Work], places: Sequence[Place], clock: GroupClock, number: int | None
    ) -> None:
        """Sample a part once its first trajectory may begin, and score it at once."""
        with within(lane=_lane(self._group, number)):
            await self._sampled(work, places, clock, number)

    async def _sampled(
        self, work: Sequence[Work], places: Sequence[Place], clock: GroupClock, number: int | None
    ) -> None:
        with suppress(TimeoutError):
            await places[0].turn(clock.deadline().at)
        part = RolloutPart(self._collection.sampler, work, places, clock)
        await self._run.picture.rollout(part, self._step, self._group, number)
        self._rollouts.append(part.rows)
        self._acknowledgements += part.acknowledgements
        async with asyncio.TaskGroup() as beside:
            if not self._run.scoring.by_group:
                beside.create_task(self._score(scorable(part.rows), number))
            if self._run.reference is not None:
                beside.create_task(self._run.reference.ask(self._step, scorable(part.rows)))
            if self._run.recomputing is not None:
                beside.create_task(self._recompute(part))

    async def _recompute(self, part: RolloutPart) -> None:
        """Have the trainer say what it makes of a part's tokens, once the part is stored."""
        await asyncio.gather(*part.acknowledgements)
        self._hand_to_trainer(part.rows)

    def _hand_to_trainer(self, stored: Rows) -> None:
        if self._run.recomputing is not None:
            ids = values(scorable(stored), "trajectory_id")
            self._run.recomputing.add(self._step, [str(each) for each in ids])

    async def _score(self, rollouts: Rows, number: int | None = None) -> None:
        if not rollouts.num_rows:
            return
        part = ScorePart(self._run.scoring, rollouts, self._step, self._collection.keep_scores)
        with within(lane=_lane(self._group, number)):
            await self._run.picture.score(part, self._step, self._group, number)
        self._scores.append(part.rows)
        self._acknowledgements += part.acknowledgements

    async def _score_group(self) -> None:
        """Show the survivors to the scorer, all at once, whichever of them came first in the order of their samples.

        A group that must be whole and is not is not scored.
        """
        survivors = in_order(scorable(joined(*self._rollouts)), "sample")
        if not joined(*self._scores).num_rows and is_shown(self._run.config, survivors):
            await self._score(survivors)

    async def _judge(self, duration_s: float) -> tuple[GroupOutcome, ...]:
        self._run.pool.forget(self._group)
        if isinstance(self._run, Collecting):
            return ()
        rows = joined(*self._rollouts), joined(*self._scores)
        return await judged(self._run, self._step, self._plan, *rows, duration_s)

    async def _missing(self) -> list[Work]:
        """The trajectories to sample, with the group's problem."""
        config = self._run.config
        if not self._plan.to_sample:
            return []
        return await group_work(
            self._run.environment,
            run=self._run.id,
            seed=config.seed,
            group=self._group,
            attempts=self._plan.to_sample,
            temperature=config.rollout.temperature,
            timeout_s=config.rollout.trajectory_timeout_s,
        )


def is_shown(config: RunConfig, survivors: Rows) -> bool:
    """True unless a scorer of groups is not to see these survivors of one: the group must be whole, and is not."""
    return survivors.num_rows >= config.rollout.group_size or not config.score.needs_whole_group


def _lane(group: int, number: int | None) -> str:
    """What a group, or a part of it where it has several, is called among the lanes."""
    return str(group) if number is None else f"{group}/{number}"


async def judged(
    run: Run, step: int, plan: GroupPlan, rollouts: Rows, scores: Rows, duration_s: float
) -> tuple[GroupOutcome, ...]:
    """What became of a group all of whose rows are stored; it is stored too, unless that was done before."""
    outcomes = judge_group(
        run.config.score,
        group=plan.group,
        env=run.environment.name,
        expected=run.config.rollout.group_size,
        survivors=survivors_of(rollouts, scores),
        dropped=where(scores, "status", "dropped").num_rows,
    )
    if not plan.is_judged:
        await run.writer.append("groups", group_rows(run.id, step, outcomes, duration_s), step=step)
    return outcomes
