"""The groups of a step: its plan, refills in place of groups that cannot be trained on, their outcomes, and its batch."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from rollmill.flows.run.live_run import Run
from rollmill.tasks.observe.spans import span
from rollmill.tasks.score.group_outcomes import (
    GroupOutcome,
    batch_rows,
    compute_advantages,
    compute_batch_advantages,
    group_rows,
    survivors_from_rows,
)
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import (
    Rows,
    column_values,
    concat_rows,
    rows_from_table,
    rows_where,
    rows_where_in,
    rows_without,
)
from rollmill.tasks.store.run.group_ranges import (
    GroupRange,
    count_refills,
    drawn_problems,
    ensure_plan,
    make_plan_rows,
    replayed_groups,
)
from rollmill.tasks.store.run.step_plan import GroupPlan, StepPlan, StoredStep, plan_step
from rollmill.tasks.store.stored_batch import read_batch_digest


class Refills:
    """Plans a further group in place of each group of a step that cannot be trained on, up to a limit.

    A group that cannot be trained on (no spread in reward, too few survivors, ...) is replaced by a further group, as in
    DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, section 3.2); a step has at most `rollout.max_refill_groups`.
    The plan has one refill for each untrainable group, refills included, in any order. So a process that resumes a step
    and computes its outcomes again plans the same number, and appends only those that a killed process had not. A refill is of the
    environment of the group that it replaces; which environments get the refills of a step that needs more than the limit depends on
    whose groups end first.

    Args:
        run: the run.
        step: its step.
        ranges: what is stored of the step's plan.
        is_closed: True when the step's batch is stored: then nothing is appended.
    """

    def __init__(self, run: Run, step: int, ranges: Sequence[GroupRange], *, is_closed: bool) -> None:
        self._run, self._step, self._ranges = run, step, list(ranges)
        self._most = 0 if is_closed else run.config.rollout.max_refill_groups
        self._n_untrainable: Counter[int] = Counter()
        # Refills are planned one after the other: each depends on those before.
        self._planning = asyncio.Lock()

    @property
    def drawn(self) -> dict[int, int]:
        """Index of each group's problem, by the group's number, of those groups whose problem was drawn by weight."""
        return drawn_problems(self._ranges)

    async def next_group(self, outcomes: Sequence[GroupOutcome]) -> int | None:
        """Plan a further group if none of these outcomes can be trained on; return its number, or None if none is planned.

        Raises:
            StoreError: the plan could not be stored; nothing of the group was begun.
        """
        if any(not outcome.reason for outcome in outcomes):
            return None
        shares = self._run.shares
        environment = shares.environment(outcomes[0].group)
        self._n_untrainable[environment] += 1
        async with self._planning:
            refills = [each for each in self._ranges if each.reason == "refill"]
            n_planned = sum(shares.environment(each.first) == environment for each in refills)
            # A killed process may have planned refills that this one has not counted yet; these are used first.
            if len(refills) >= self._most or n_planned >= self._n_untrainable[environment]:
                return None
            refill = await asyncio.to_thread(
                self._run.problems.plan_refill, self._step, tuple(self._ranges), outcomes[0].group
            )
            self._ranges.append(refill)
        await self._run.store.writer.store(
            "plans", make_plan_rows(self._run.id, self._step, [refill]), step=self._step
        )
        return refill.first

    def lacking(self, outcomes: Sequence[GroupOutcome]) -> str:
        """Return a log line if a step has fewer trainable groups than configured after all its refills; else empty."""
        # Of the planned groups, those in whose place stored ones are need no refill.
        n_wanted = self._run.config.rollout.groups_per_step - len(replayed_groups(self._ranges))
        n_trained = len({outcome.group for outcome in outcomes if not outcome.reason})
        if not self._most or n_trained >= n_wanted:
            return ""
        return (
            f"step {self._step}: after {count_refills(self._ranges)} refills, of rollout.max_refill_groups = {self._most}, "
            f"{n_trained} of {n_wanted} groups can be trained on"
        )


async def plan_ranges(run: Run, step: int) -> Sequence[GroupRange]:
    """Return the stored ranges of a step's group numbers, refills included; plan and store the first if there is none."""

    def plan(step: int) -> Sequence[GroupRange]:
        planned = run.problems.plan(step)
        # A run of the flow collect trains on nothing.
        return (planned, *(run.replay.plan(step, planned) if run.store.manifest.trains else ()))

    return await ensure_plan(run.folder, run.store.writer, plan, run=run.id, step=step)


async def plan_groups(run: Run, step: int, groups: Sequence[int]) -> StepPlan:
    """Plan which trajectories of a step's groups are to be sampled, and which rollouts are to be scored.

    Of groups of which something is redone, stored outcomes and failed scores are removed, and all scores by a group scorer.
    """
    plan = await asyncio.to_thread(_plan, run, step, groups)
    if not plan.redone:
        return plan
    # Stored outcomes are kept as they are, so a redone trajectory would not change them.
    await _remove_rows(run, "groups", lambda rows: rows_where_in(rows, "group", plan.redone), step=step)
    by_group = [each for each in plan.redone if run.environment_of(each).scoring.by_group]

    def select_scores(rows: Rows) -> Rows:
        redone = rows_where_in(rows, "group", plan.redone)
        return concat_rows(rows_where(redone, "status", "failed"), rows_where_in(redone, "group", by_group))

    await _remove_rows(run, "scores", select_scores, scorer=run.scores_key, step=step)
    without = await asyncio.to_thread(_plan, run, step, groups)
    pairs = zip(without.groups, plan.groups, strict=True)
    return StepPlan(
        tuple(replace(each, n_scores_redone=before.n_scores_redone) for each, before in pairs),
        without.has_batch,
    )


def _plan(run: Run, step: int, groups: Sequence[int]) -> StepPlan:
    stored = StoredStep.read(run.folder, step, run.scores_key)
    return plan_step(groups, run.config.rollout.group_size, stored, redo_failed=run.redo_failed)


async def _remove_rows(
    run: Run, dataset: Literal["groups", "scores"], select: Callable[[Rows], Rows], **partition: int | str
) -> None:
    """Remove the rows that `select` returns from one partition of a data set, unless there are none."""
    stored = rows_from_table(await asyncio.to_thread(lambda: read(run.folder, dataset, None, **partition)))
    key = {"groups": "group", "scores": "trajectory_id"}[dataset]
    if (removed := select(stored)).num_rows:
        await run.store.writer.replace(
            dataset, rows_without(stored, key, column_values(removed, key)), **partition
        )


async def store_group_outcomes(
    run: Run, step: int, plan: GroupPlan, rollouts: Rows, scores: Rows, duration_s: float
) -> tuple[GroupOutcome, ...]:
    """Compute the advantages of a group whose rows are all stored, and store its outcomes unless they are stored."""
    environment = run.environment_of(plan.group)
    compute = partial(
        compute_advantages,
        environment.config.score,
        group=plan.group,
        env=environment.name,
        expected=run.config.rollout.group_size,
        survivors=survivors_from_rows(rollouts, scores),
        dropped=rows_where(scores, "status", "dropped").num_rows,
    )
    # For each of a group's tokens a function may compute for seconds.
    by_position = run.config.score.credit != "trajectory"
    outcomes = await asyncio.to_thread(compute) if by_position else compute()
    # A row that is stored stays: a resumed step computes the same outcomes again.
    if not plan.has_outcome:
        await run.store.writer.append("groups", group_rows(run.id, step, outcomes, duration_s), step=step)
    return outcomes


async def store_batch(run: Run, step: int, outcomes: Sequence[GroupOutcome]) -> str:
    """Select the trajectories that the step is trained on, and store them as its batch; return the batch's digest.

    These are those of the step's outcomes, and of the stored groups in its plan.
    """
    with span("storing"):
        stored, origins = await asyncio.to_thread(run.replay.read_outcomes, step)
        settled = await asyncio.to_thread(compute_batch_advantages, run.config.score, [*outcomes, *stored])
        rows = batch_rows(run.id, step, settled, run.scores_key, origins)
        await run.store.writer.store("batches", rows, step=step)
        # From the stored rows and not from memory: the trainer compares the digest with what it reads.
        return await asyncio.to_thread(read_batch_digest, run.folder, step)
