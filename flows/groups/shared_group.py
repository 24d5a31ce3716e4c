"""A group of a step that a collector samples and scores, or this process where no collector is left; judged here."""

import time
from collections.abc import Sequence

from flows.groups.collectors import Collectors
from flows.groups.group import GroupCollection, StepCollection, judged
from flows.running.run import Run
from tasks.errors import CollectorGoneError
from tasks.observe.spans import span, within
from tasks.rollout.admission import ROLLOUT, Place
from tasks.score.outcome import GroupOutcome
from tasks.score.scoring import scorable
from tasks.store.rows import values
from tasks.store.step import GroupPlan


class SharedGroup:
    """One group, handed out until it is done.

    Args:
        run: the run.
        collection: of the step, which the rows are kept by.
        plan: where the group stands.
        collectors: of the run.
    """

    def __init__(self, run: Run, collection: StepCollection, plan: GroupPlan, collectors: Collectors) -> None:
        self._run, self._collection, self._plan, self._collectors = run, collection, plan, collectors

    async def collect(self) -> tuple[GroupOutcome, ...]:
        """Have a collector sample what is missing and score what is unscored, and judge the group once all is stored."""
        with within(lane=str(self._plan.group)):
            return await self._collected()

    async def _collected(self) -> tuple[GroupOutcome, ...]:
        started = time.perf_counter()
        self._hand_to_trainer()
        while self._plan.to_sample or self._has_unscored():
            with span("waiting_for_collector"):
                are_there = await self._collectors.are_there()
            if not are_there:
                break
            with self._run.admission.places(
                len(self._plan.to_sample), (self._collection.step, ROLLOUT)
            ) as places:
                if places:
                    await places[0].turn()
                if await self._handed_out(places):
                    self._collection.group_over(places)
                    rows = self._plan.rollouts, self._plan.scores
                    seconds = time.perf_counter() - started
                    return await judged(self._run, self._collection.step, self._plan, *rows, seconds)
        return await GroupCollection(self._collection, self._plan).collect()

    def _hand_to_trainer(self) -> None:
        if self._run.recomputing is not None:
            ids = values(scorable(self._plan.rollouts), "trajectory_id")
            self._run.recomputing.add(self._collection.step, [str(each) for each in ids])

    def _has_unscored(self) -> bool:
        return bool(scorable(self._plan.to_score).num_rows)

    async def _handed_out(self, places: Sequence[Place]) -> bool:
        """Hand the group out, and wait; False when the collector went away before it was done."""
        lease = self._collectors.hand_out(self._collection, self._plan, places)
        if lease is None:
            return False
        try:
            await lease.over
        except CollectorGoneError:
            return False
        finally:
            self._collectors.take_back(lease)
            self._plan = lease.rest()
        return True
