"""The seam between a step and the executor of its groups: what is asked of an executor for one group, and what it returns.

collect_step (flows/step) asks for a group's work -> Executor.begin_step -> StepWork.open_group -> GroupWork.rollout, .score

The executor `local` does the work in the flow's process; `ray` has actors do it, each of which calls the executor `local` in its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.rollout.admission import SlotTicket
from rollmill.tasks.rollout.episode import Deadline
from rollmill.tasks.rollout.task import RolloutWork
from rollmill.tasks.score.task import ScoreWork
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.run.step_plan import Attempt

SeeRows: TypeAlias = Callable[[Rows], None]
"""Called with rows that failed; what it raises ends the step."""


@dataclass(frozen=True, slots=True)
class GroupTask:
    """Trajectories of one group that are to be sampled.

    Attributes:
        index: of the group's problem among the environment's training problems; None: it follows from the group's number.
    """

    step: int
    group: int
    index: int | None
    attempts: tuple[Attempt, ...]


class GroupWork(Protocol):
    """The work of one group: rollout and score tasks that are done here or elsewhere."""

    def trim(self, rows: Rows) -> Rows:
        """Return those columns of stored rows that this executor's results have; it returns and takes no others."""

    def rollout(
        self, attempts: Sequence[Attempt], tickets: Sequence[SlotTicket], deadline: Deadline
    ) -> RolloutWork:
        """Return work that samples trajectories of the group's task, with a ticket for the slot of each."""

    def score(self, rollouts: Rows) -> ScoreWork:
        """Return work that scores stored rollouts, or those that the group's rollout work returned."""


class StepWork(Protocol):
    """The groups of one step."""

    async def open_group(self, task: GroupTask) -> GroupWork:
        """Prepare the work of a group."""


class Executor(Protocol):
    """Samples and scores the groups of a run, and stores their rows."""

    def begin_step(self, step: int, see: SeeRows) -> StepWork:
        """Return the work of a step; `see` is called with rollouts that failed and with all scores."""

    async def end_step(self, step: int) -> Sequence[Metric]:
        """Store what other processes have recorded of a step, all of whose groups are done; return their metrics of it."""
