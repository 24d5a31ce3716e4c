"""The fan-out of one step: every group's rollouts, scored the moment they are there, and the batch of them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prefect.logging import get_run_logger

from flows.groups.collectors import Collectors
from flows.groups.group import GroupCollection, StepCollection
from flows.groups.refills import Refills
from flows.groups.shared_group import SharedGroup
from flows.running.failures import FailureWatch
from flows.running.run import Run
from flows.ui.progress import say
from tasks.observe.spans import span
from tasks.score.advantages.batch import settled
from tasks.score.outcome import GroupOutcome, batch_rows
from tasks.store.batch import stored_digest
from tasks.store.plan import group_numbers, settled_plan
from tasks.store.reader import read
from tasks.store.rows import rows_of, without
from tasks.store.step import GroupPlan, StepPlan, StoredStep, new_group, plan_step


@dataclass(frozen=True, slots=True)
class Collected:
    """A step whose groups are all done.

    Attributes:
        seconds: from its first group's start to its last group's end.
        few_left_ns: since when it waited for its last groups alone; see StepCollection.
    """

    step: int
    outcomes: Sequence[GroupOutcome]
    seconds: float
    few_left_ns: int


async def collect_step(run: Run, step: int, collectors: Collectors | None = None) -> Collected:
    """Finish the step's rollouts, scores and groups.

    What lies in the folder already is kept; only what is missing is generated, by collectors where the run has them.

    Raises:
        FailedShareError: too many of its trajectories failed.
        ShardError: rows are gone that were stored, or cannot be read.
    """
    started, rollout = time.perf_counter(), run.config.rollout
    with span("planning"):
        ranges = await settled_plan(
            run.folder,
            run.store.writer,
            run=run.id,
            step=step,
            groups_per_step=rollout.groups_per_step,
            max_refill_groups=rollout.max_refill_groups,
        )
        plan = await planned(run, step, group_numbers(ranges))
    if plan.redone:
        say(f"step {step}: {sum(each.attempt > 0 for each in plan.to_sample)} failed trajectories are redone")
    failures = FailureWatch(
        step, len(plan.groups) * rollout.group_size, rollout.max_failed_share, logger=get_run_logger
    )
    for group in plan.groups:
        for rows in (group.rollouts, group.scores):
            failures.see(rows, is_new=False)
    refills = Refills(run, step, ranges, is_closed=plan.has_batch)
    collection = StepCollection(run, step, failures)
    outcomes = await _fan_out(run, collection, plan.groups, refills, collectors)
    if lacking := refills.lacking(outcomes):
        say(lacking)
    return Collected(step, outcomes, time.perf_counter() - started, collection.few_left_ns)


async def _fan_out(
    run: Run,
    collection: StepCollection,
    groups: Sequence[GroupPlan],
    refills: Refills,
    collectors: Collectors | None,
) -> list[GroupOutcome]:
    """Collect all groups side by side, and refills the moment a group is found untrainable; outcomes by number."""
    outcomes: list[GroupOutcome] = []
    group_size = run.config.rollout.group_size

    async def collect(group: GroupPlan) -> None:
        here = GroupCollection(collection, group)
        work = SharedGroup(run, collection, group, collectors) if collectors else here
        judged = await work.collect()
        outcomes.extend(judged)
        if (refill := await refills.after(judged)) is not None:
            collection.failures.plan_more(group_size)
            fan_out.create_task(collect(new_group(refill, group_size)))

    async with asyncio.TaskGroup() as fan_out:
        for group in groups:
            fan_out.create_task(collect(group))
            await asyncio.sleep(0)
    return sorted(outcomes, key=lambda outcome: (outcome.group, outcome.subgroup))


async def planned(run: Run, step: int, groups: Sequence[int]) -> StepPlan:
    """The step's plan; when failed trajectories are to be redone, what was made of their groups is taken back."""
    plan = await asyncio.to_thread(_plan, run, step, groups)
    if not plan.redone:
        return plan
    await _take_back(run, "groups", plan.redone, step=step)
    if run.scoring.by_group:
        await _take_back(run, "scores", plan.redone, scorer=run.scoring.key, step=step)
    return await asyncio.to_thread(_plan, run, step, groups)


def _plan(run: Run, step: int, groups: Sequence[int]) -> StepPlan:
    stored = StoredStep.read(run.folder, step, run.scoring.key)
    return plan_step(groups, run.config.rollout.group_size, stored, redo_failed=run.redo_failed)


async def _take_back(run: Run, dataset: str, groups: Sequence[int], **partition: int | str) -> None:
    """Leave these groups' rows out of a partition."""
    stored = rows_of(await asyncio.to_thread(lambda: read(run.folder, dataset, None, **partition)))
    await run.store.writer.replace(dataset, without(stored, "group", groups), **partition)


async def store_batch(run: Run, collected: Collected) -> str:
    """Write the selection that trains the step, and return its digest."""
    step = collected.step
    with span("storing"):
        outcomes = settled(run.config.score, collected.outcomes)
        rows = batch_rows(run.id, step, outcomes, run.scoring.key)
        await run.store.writer.append("batches", rows, step=step)
        return await asyncio.to_thread(stored_digest, run.folder, step)
