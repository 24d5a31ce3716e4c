"""What remains to be done in a step: a pure function of its stored rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder, partition_folder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import (
    Rows,
    column_values,
    last_rows_by,
    name_first,
    no_rows,
    rows_from_table,
    rows_where,
    rows_where_in,
    rows_without,
)
from rollmill.tasks.store.schemas import LOST_STATUSES


class Attempt(NamedTuple):
    """A trajectory to be sampled, number `sample` of its group; `attempt` is above 0 if a user asked to sample it again."""

    group: int
    sample: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The rows of one step that earlier processes stored; they are not generated again.

    Attributes:
        rollouts: rows of the `rollouts` data set.
        scores: rows of one scorer's `scores` data set.
        outcomes: groups that have a row in the `groups` data set.
        has_batch: True if its batch is stored, after which the step never changes.
    """

    rollouts: Rows
    scores: Rows
    outcomes: frozenset[int]
    has_batch: bool = False

    @classmethod
    def read(cls, folder: RunFolder, step: int, scorer: str) -> "StoredStep":
        """Read the stored rows of a step; `scorer` is NAME@VERSION. Raises ShardError for an unreadable shard."""
        groups = rows_from_table(read(folder, "groups", columns=["group"], step=step))
        return cls(
            rollouts=rows_from_table(read(folder, "rollouts", step=step)),
            scores=rows_from_table(read(folder, "scores", scorer=scorer, step=step)),
            outcomes=frozenset(int(str(group)) for group in column_values(groups, "group")),
            has_batch=bool(open_files(folder).keys(f"{partition_folder('batches', {'step': step})}/*.arrow")),
        )


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The stored rows of one group, and its remaining work: trajectories to sample and rollouts to score.

    Attributes:
        to_sample: trajectories that have no row or are to be sampled again; sorted by sample.
        rollouts: stored rollouts, the last attempt of each sample, including failed and cancelled ones.
        scores: stored rows of scores of these rollouts, without failed ones that are to be redone.
        to_score: `rollouts` without one of these scores, including failed and cancelled ones.
        has_outcome: True when the group has its row in `groups`, and nothing of it is to be redone.
        n_scores_redone: number of failed scores that are to be redone.
    """

    group: int
    to_sample: tuple[Attempt, ...]
    rollouts: Rows
    scores: Rows
    to_score: Rows
    has_outcome: bool
    n_scores_redone: int = 0

    @property
    def n_sampled_again(self) -> int:
        """Number of failed and cancelled trajectories that are to be sampled again."""
        return sum(each.attempt > 0 for each in self.to_sample)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What remains to be done in a step: the plan of each of its groups, in the order of the step's plan.

    Attributes:
        has_batch: True when the step's batch is stored: then nothing of it is to be sampled.
    """

    groups: tuple[GroupPlan, ...]
    has_batch: bool

    @property
    def to_sample(self) -> tuple[Attempt, ...]:
        """All trajectories to sample, over all groups of the step."""
        return tuple(attempt for each in self.groups for attempt in each.to_sample)

    @property
    def redone(self) -> tuple[int, ...]:
        """Numbers of the groups in which failed trajectories are to be sampled, or failed scores computed again."""
        return tuple(each.group for each in self.groups if each.n_sampled_again or each.n_scores_redone)


def plan_step(
    groups: Iterable[int], group_size: int, stored: StoredStep, *, redo_failed: bool = False
) -> StepPlan:
    """Plan what remains to be done in a step, given the group numbers of its plan and its stored rows.

    With `redo_failed`, failed and cancelled trajectories are sampled again, as another attempt, and a failed score counts as none.

    Example: groups 4 and 5 of two trajectories each, where (4, 0) has a row and no score: sample (4, 1), (5, 0)
    and (5, 1), score (4, 0), compute the advantages of 4 and 5.

    Raises:
        ShardError: rows are missing that other rows of the step refer to; names them.
    """
    plans = (_plan_group(group, group_size, stored, redo_failed) for group in groups)
    return StepPlan(tuple(plans), stored.has_batch)


def plan_new_group(group: int, group_size: int) -> GroupPlan:
    """Plan a group that has no stored rows: all its `group_size` trajectories are to be sampled."""
    nothing = StoredStep(no_rows("rollouts"), no_rows("scores"), frozenset())
    return _plan_group(group, group_size, nothing, redo_failed=False)


def select_unscored(rollouts: Rows, scores: Rows) -> Rows:
    """Select the rollouts whose trajectory has no row in `scores`, in order, including failed and cancelled ones."""
    return rows_without(rollouts, "trajectory_id", column_values(scores, "trajectory_id"))


def _plan_group(group: int, group_size: int, stored: StoredStep, redo_failed: bool) -> GroupPlan:
    all_rollouts = rows_where(stored.rollouts, "group", group)
    scores = rows_where(stored.scores, "group", group)
    # A rollout is stored before its score, so a score alone means that a shard of rollouts was lost since.
    if alone := column_values(select_unscored(scores, all_rollouts), "trajectory_id"):
        raise _missing_rollouts_error(group, [str(each) for each in alone], "they have scores")
    rollouts = last_rows_by(all_rollouts, ["sample"], "attempt")
    latest = zip(*(column_values(rollouts, name) for name in ("sample", "attempt", "status")), strict=True)
    attempts = {int(str(sample)): (int(str(attempt)), status) for sample, attempt, status in latest}
    missing = [Attempt(group, sample, 0) for sample in range(group_size) if sample not in attempts]
    # What a group with an outcome lacks was there once: sampled again, it would differ from what its advantages were computed from.
    if missing and (stored.has_batch or group in stored.outcomes):
        raise _missing_rollouts_error(
            group, [f"sample {each.sample}" for each in missing], "its advantages are computed"
        )
    redone = [
        Attempt(group, sample, attempt + 1)
        for sample, (attempt, status) in attempts.items()
        if redo_failed and status in LOST_STATUSES and not stored.has_batch
    ]
    kept = rows_without(rollouts, "sample", [each.sample for each in redone])
    scores = rows_where_in(scores, "trajectory_id", column_values(kept, "trajectory_id"))
    failed = rows_where(scores, "status", "failed")
    if not redo_failed or stored.has_batch:
        failed = failed.slice(0, 0)
    scores = rows_without(scores, "trajectory_id", column_values(failed, "trajectory_id"))
    return GroupPlan(
        group=group,
        to_sample=tuple(sorted([*missing, *redone])),
        rollouts=kept,
        scores=scores,
        to_score=select_unscored(kept, scores),
        has_outcome=group in stored.outcomes and not redone and not failed.num_rows,
        n_scores_redone=failed.num_rows,
    )


def _missing_rollouts_error(group: int, missing: Sequence[str], reason: str) -> ShardError:
    return ShardError(
        f"group {group}: stored rollouts are missing ({name_first(missing)}; {reason}): bring the shards back that "
        "were removed from rollouts/, or begin a new run"
    )
