"""What happened when: the form in which computed and measured schedules are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Interval(NamedTuple):
    """One slot's time with one piece of work, in seconds since the beginning."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run over the work of one seed.

    Attributes:
        makespan_s: seconds from the call until everything was scored, and stored by a system that stores.
        rollouts: when each rollout held its slot, in any order.
        scores: when each score held its slot, in any order.
    """

    makespan_s: float
    rollouts: Sequence[Interval]
    scores: Sequence[Interval]

    @property
    def first_score_s(self) -> float:
        """When the first score was there."""
        return min(end for _, end in self.scores)

    def rollout_share(self, n_slots: int) -> float:
        """Share of the rollout slots' time until the end in which they had a rollout."""
        return _busy_s(self.rollouts) / (n_slots * self.makespan_s)

    def scoring_share(self, n_slots: int) -> float:
        """Share of the scoring slots' time until the end in which they had a score."""
        return _busy_s(self.scores) / (n_slots * self.makespan_s)


def _busy_s(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)
