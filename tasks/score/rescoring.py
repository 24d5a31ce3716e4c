"""What of a step's stored rollouts a scorer has not scored yet: a pure function of the rows that are stored."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from tasks.score.scoring import Scoring, scorable
from tasks.store.rows import Rows, joined, values, where, where_in, without

READ = (
    *("group", "sample", "trajectory_id", "env", "status"),
    *("example", "messages", "outcome", "n_completion_tokens"),
)
"""Columns of a rollout that scoring needs."""


def groups_to_score(
    rollouts: Rows,
    scored: Collection[object],
    *,
    whole: Mapping[int, int] | None,
) -> list[Rows]:
    """The trajectories of a step that have no score yet, group by group in order of group and sample.

    Args:
        rollouts: rows of one step; columns group, sample, trajectory_id and status at least.
        scored: trajectory ids that the scorer has a row for.
        whole: for a scorer of groups, the groups that are done, which it is shown with all their survivors, once, and
            the fewest survivors with which it is; None for a scorer of single trajectories.

    Example: of a group with samples 0, 1 and 2, of which 1 failed and 0 is scored, sample 2 is left; for a scorer
    of groups nothing is.
    """
    survivors = scorable(rollouts)
    if whole is None:
        left = without(survivors, "trajectory_id", scored)
        return _by_group(left)
    begun = set(values(where_in(survivors, "trajectory_id", scored), "group"))
    return [
        rows
        for rows in _by_group(without(survivors, "group", begun))
        if (group := rows.column("group")[0].as_py()) in whole and rows.num_rows >= whole[group]
    ]


def standing_scores(
    rollouts: Rows, scores: Rows, *, whole: Collection[int] | None, redo_failed: bool = False
) -> Rows:
    """The scores of a step that stay; what is left out makes way for new ones.

    Failed scores are left out when they are to be given again. Of a scorer of groups a group's scores stay together or
    not at all: they are left out as well when a survivor has none, since a trajectory was sampled again.

    Args:
        rollouts: as for `groups_to_score`.
        scores: the scorer's rows of that step; columns group, trajectory_id and status at least.
        whole: groups that are done, for a scorer of groups; None for a scorer of single trajectories.
        redo_failed: True to give failed scores again.

    Example: of a group with survivors 0 and 1, of which 0 is scored, a scorer of single trajectories keeps that score,
    and a scorer of groups does not.
    """
    failed = where(scores, "status", "failed") if redo_failed else scores.slice(0, 0)
    if whole is None:
        return without(scores, "trajectory_id", values(failed, "trajectory_id"))
    missing = without(scorable(rollouts), "trajectory_id", values(scores, "trajectory_id"))
    stale = {*values(failed, "group"), *values(missing, "group")} & set(whole)
    return without(scores, "group", stale)


def _by_group(rows: Rows) -> list[Rows]:
    ordered = rows.sort_by([("group", "ascending"), ("sample", "ascending")])
    return [where(ordered, "group", group) for group in dict.fromkeys(values(ordered, "group"))]


class GroupsPart:
    """Groups of one step that one score task run scores.

    Not a dataclass: Prefect looks into dataclasses among a task's parameters.

    Args:
        keep: hands rows to the run's writer; what it returns is done when they are stored.
    """

    __slots__ = ("groups", "keep", "scoring", "step")

    def __init__(
        self,
        scoring: Scoring,
        groups: Sequence[Rows],
        step: int,
        keep: Callable[[Rows], Awaitable[None]],
    ) -> None:
        self.scoring, self.groups, self.step, self.keep = scoring, groups, step, keep

    async def score(self) -> str:
        """Score and store; returns how it went, in words. A group's rows are stored at once, or not at all."""
        shown = self.groups if self.scoring.by_group else [joined(*self.groups)]
        async with asyncio.TaskGroup() as scoring:
            tasks = [scoring.create_task(self._scored(each)) for each in shown]
        rows = joined(*(task.result() for task in tasks))
        rewards = [reward for reward in rows.column("reward").to_pylist() if reward == reward]
        mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        return f"{rows.num_rows} scores{mean}"

    async def _scored(self, rollouts: Rows) -> Rows:
        rows = await self.scoring.score(rollouts, step=self.step)
        await self.keep(rows)
        return rows
