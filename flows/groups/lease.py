"""A group in a collector's hands: its rows are kept here as they come, and what is left of it when the collector is gone."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from flows.groups.collector_messages import Grant, Group, Message
from flows.groups.group import StepCollection
from tasks.rollout.admission import Admission, Place
from tasks.store.parcels import packed
from tasks.store.rows import Rows, joined, values
from tasks.store.step import GroupPlan, unscored

Send = Callable[[Message], None]


class Lease:
    """One handing out of a group.

    Args:
        number: its own, of all that the run hands out.
        collection: of the step.
        plan: where the group stands.
        places: for its trajectories, the first of them granted.
        admission: that they are of.
        send: tells the collector something.

    Attributes:
        over: done when the collector is done; its error says why it will not be.
        n_left: trajectories that are not here yet.
    """

    def __init__(
        self,
        number: int,
        collection: StepCollection,
        plan: GroupPlan,
        places: Sequence[Place],
        admission: Admission,
        send: Send,
    ) -> None:
        self.number, self._collection, self._plan = number, collection, plan
        self._places, self._admission, self._send = list(places), admission, send
        self._rollouts, self._scores = plan.rollouts, plan.scores
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.n_left = len(plan.to_sample)

    @property
    def step(self) -> int:
        """The step that the group is of."""
        return self._collection.step

    def begin(self) -> None:
        """Hand the group out."""
        plan, granted = self._plan, [place for place in self._places if place.granted.done()]
        self._send(
            Group(
                lease=self.number,
                step=self._collection.step,
                group=plan.group,
                to_sample=[(each.sample, each.attempt) for each in plan.to_sample],
                rollouts=packed(plan.rollouts),
                scores=packed(plan.scores),
                to_score=packed(plan.to_score),
                granted=len(granted),
            )
        )
        for place in self._places:
            if not place.granted.done():
                place.granted.add_done_callback(self._granted)

    def take(self, dataset: str, rows: Rows) -> Awaitable[None]:
        """Keep rows; what is returned is done when they are stored.

        Raises:
            FailedShareError: with these, too many trajectories of the step failed.
            SchemaError, StoreError: they are no rows of that data set and step.
        """
        match dataset:
            case "rollouts":
                self._rollouts = joined(self._rollouts, rows)
                self._free(rows.num_rows)
                return self._collection.keep_rollouts(rows)
            case "scores":
                self._scores = joined(self._scores, rows)
                return self._collection.keep_scores(rows)
            case _:
                return self._collection.keep_beside(dataset, rows)

    def rest(self) -> GroupPlan:
        """Where the group stands now."""
        there = {(sample, attempt) for sample, attempt in zip(*self._of_attempts(), strict=True)}
        return replace(
            self._plan,
            to_sample=tuple(
                each for each in self._plan.to_sample if (each.sample, each.attempt) not in there
            ),
            rollouts=self._rollouts,
            scores=self._scores,
            to_score=unscored(self._rollouts, self._scores),
        )

    def _of_attempts(self) -> tuple[Sequence[object], Sequence[object]]:
        return values(self._rollouts, "sample"), values(self._rollouts, "attempt")

    def _free(self, n: int) -> None:
        """Give back the places of trajectories that are here."""
        self.n_left -= n
        for place in sorted(self._places, key=lambda each: not each.granted.done())[:n]:
            self._places.remove(place)
            self._admission.leave(place)

    def _granted(self, granted: asyncio.Future[None]) -> None:
        if not granted.cancelled() and not self.over.done():
            self._send(Grant(self.number, 1))
