"""What of a step is done and what is to do: a pure function of the rows that lie in the folder."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tasks.errors import ShardError
from tasks.store.filesystem import files_of
from tasks.store.findings import named
from tasks.store.layout import RunFolder, partition_folder
from tasks.store.reader import read
from tasks.store.rows import Rows, last_by, no_rows, rows_of, values, where, where_in, without

LOST = ("failed", "cancelled")
"""Statuses of rollouts that are final, and sampled again only when a user asks for it."""


class Attempt(NamedTuple):
    """One trajectory to be sampled; `attempt` is 0 unless a user asked to redo failed ones."""

    group: int
    sample: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StoredStep:
    """Rows of one step that earlier processes stored; nothing of it is generated again.

    Attributes:
        rollouts: rows of the `rollouts` data set.
        scores: rows of one scorer's `scores` data set.
        judged: groups that have a row in the `groups` data set.
        has_batch: True when its batch is stored, after which nothing of the step changes.
    """

    rollouts: Rows
    scores: Rows
    judged: frozenset[int]
    has_batch: bool = False

    @classmethod
    def read(cls, folder: RunFolder, step: int, scorer: str) -> "StoredStep":
        """Read a step; `scorer` is NAME@VERSION.

        Raises:
            ShardError: a shard cannot be read.
        """
        groups = rows_of(read(folder, "groups", columns=["group"], step=step))
        return cls(
            rollouts=rows_of(read(folder, "rollouts", step=step)),
            scores=rows_of(read(folder, "scores", scorer=scorer, step=step)),
            judged=frozenset(int(str(group)) for group in values(groups, "group")),
            has_batch=bool(files_of(folder).keys(f"{partition_folder('batches', {'step': step})}/*.arrow")),
        )


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What of a group is done, and what is to do.

    Attributes:
        to_sample: trajectories without a row, or to be redone, by sample.
        rollouts: finished ones, the last attempt of each sample, failed and cancelled ones too.
        scores: of those.
        to_score: those of `rollouts` without a score; the failed and cancelled ones are among them.
        is_judged: True when the group has its row in `groups`, and nothing of it is to be sampled.
    """

    group: int
    to_sample: tuple[Attempt, ...]
    rollouts: Rows
    scores: Rows
    to_score: Rows
    is_judged: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plans of a step's groups, in the order of the step's plan.

    Attributes:
        has_batch: True when the step's batch is stored: then nothing of it is to be sampled.
    """

    groups: tuple[GroupPlan, ...]
    has_batch: bool

    @property
    def to_sample(self) -> tuple[Attempt, ...]:
        """All trajectories to sample."""
        return tuple(attempt for each in self.groups for attempt in each.to_sample)

    @property
    def redone(self) -> tuple[int, ...]:
        """The groups of which a trajectory is to be sampled that has failed before."""
        return tuple(each.group for each in self.groups if any(one.attempt for one in each.to_sample))

    @property
    def to_judge(self) -> tuple[int, ...]:
        """The groups without a row."""
        return tuple(each.group for each in self.groups if not each.is_judged)


def plan_step(
    groups: Iterable[int], group_size: int, stored: StoredStep, *, redo_failed: bool = False
) -> StepPlan:
    """What is to do in a step, by what is stored of it.

    Args:
        groups: the group numbers of its plan.
        group_size: trajectories of a group (G).
        stored: its rows.
        redo_failed: True to sample failed and cancelled trajectories again, as a further attempt.

    Example: groups 4 and 5 of two trajectories each, of which (4, 0) has a row and no score: to sample are (4, 1),
    (5, 0) and (5, 1), to score (4, 0), to judge 4 and 5.

    Raises:
        ShardError: rows are missing that others of the step stand on; names them.
    """
    plans = (_plan_group(group, group_size, stored, redo_failed) for group in groups)
    return StepPlan(tuple(plans), stored.has_batch)


def new_group(group: int, group_size: int) -> GroupPlan:
    """The plan of a group of which nothing is stored."""
    nothing = StoredStep(no_rows("rollouts"), no_rows("scores"), frozenset())
    return _plan_group(group, group_size, nothing, redo_failed=False)


def unscored(rollouts: Rows, scores: Rows) -> Rows:
    """The rollouts without a row among `scores`, in order, failed and cancelled ones too."""
    return without(rollouts, "trajectory_id", values(scores, "trajectory_id"))


def _plan_group(group: int, group_size: int, stored: StoredStep, redo_failed: bool) -> GroupPlan:
    rollouts = last_by(where(stored.rollouts, "group", group), ["sample"], "attempt")
    scores = where(stored.scores, "group", group)
    _check_scored(group, where(stored.rollouts, "group", group), scores)
    latest = zip(*(values(rollouts, name) for name in ("sample", "attempt", "status")), strict=True)
    attempts = {int(str(sample)): (int(str(attempt)), status) for sample, attempt, status in latest}
    missing = [Attempt(group, sample, 0) for sample in range(group_size) if sample not in attempts]
    if missing and (stored.has_batch or group in stored.judged):
        raise _lost(group, [f"sample {each.sample}" for each in missing], "the group is judged")
    redone = [
        Attempt(group, sample, attempt + 1)
        for sample, (attempt, status) in attempts.items()
        if redo_failed and status in LOST and not stored.has_batch
    ]
    kept = without(rollouts, "sample", [each.sample for each in redone])
    scores = where_in(scores, "trajectory_id", values(kept, "trajectory_id"))
    return GroupPlan(
        group=group,
        to_sample=tuple(sorted([*missing, *redone])),
        rollouts=kept,
        scores=scores,
        to_score=unscored(kept, scores),
        is_judged=group in stored.judged and not redone,
    )


def _check_scored(group: int, rollouts: Rows, scores: Rows) -> None:
    """Refuse scores of trajectories that are not there."""
    if without_rollout := values(unscored(scores, rollouts), "trajectory_id"):
        raise _lost(group, [str(each) for each in without_rollout], "they have scores")


def _lost(group: int, missing: Sequence[str], reason: str) -> ShardError:
    return ShardError(
        f"group {group}: rollouts are gone that had been stored ({named(missing)}; {reason}): bring the shards back that "
        "were removed from rollouts/, or begin a new run"
    )
