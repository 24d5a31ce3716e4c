"""The fan-out of one step: every group's rollouts, scored the moment they are there, and the batch of them."""

import asyncio
import time
from collections import Counter

from flows.run import Run
from tasks.errors import FailedShareError
from tasks.rollout.group import GroupPart, StepSampler, group_work
from tasks.rollout.task import rollout
from tasks.rollout.trajectory import Work
from tasks.score.outcome import GroupOutcome, batch_rows, group_row, judge_group, survivors_of
from tasks.score.part import ScorePart, StepScorer
from tasks.score.scoring import scorable
from tasks.score.task import score
from tasks.store.batch import stored_digest
from tasks.store.plan import group_numbers, settled_plan
from tasks.store.reader import read
from tasks.store.rows import joined, rows_of, values, where, without
from tasks.store.step import StoredStep


class StepCollection:
    """What the groups of one step share: how they sample, how they are scored, and what is stored already."""

    def __init__(self, run: Run, step: int, stored: StoredStep) -> None:
        append, scorer_key = run.store.writer.append, run.scorer_key
        self.run, self.step = run, step
        self.stored = stored
        self.sampler = StepSampler(
            player=run.player,
            admission=run.admission,
            run=run.id,
            step=step,
            keep=lambda rows: append("rollouts", rows, step=step),
        )
        self.scorer = StepScorer(
            scorer=run.scorer,
            executor=run.score_executor,
            timeout_s=run.config.score.timeout_s,
            run=run.id,
            step=step,
            keep=lambda rows: append("scores", rows, scorer=scorer_key, step=step),
        )

    async def missing(self, group: int) -> list[Work]:
        """The trajectories of a group that have no row yet."""
        config = self.run.config
        stored = set(values(where(self.stored.rollouts, "group", group), "sample"))
        return await group_work(
            self.run.environment,
            run=self.run.id,
            seed=config.seed,
            group=group,
            samples=[sample for sample in range(config.rollout.group_size) if sample not in stored],
            temperature=config.rollout.temperature,
        )


async def collect_step(run: Run, step: int) -> str:
    """Finish the step's rollouts, scores and groups, and store its batch; returns the batch's digest.

    What lies in the folder already is kept; only what is missing is generated.
    """
    ranges = await settled_plan(
        run.folder,
        run.store.writer,
        run=run.id,
        step=step,
        groups_per_step=run.config.rollout.groups_per_step,
    )
    stored = await asyncio.to_thread(StoredStep.read, run.folder, step, run.scorer_key)
    collection = StepCollection(run, step, stored)
    async with asyncio.TaskGroup() as fan_out:
        collecting = []
        for group in group_numbers(ranges):
            await run.recording.hold_back()
            collecting.append(fan_out.create_task(collect_group(collection, group)))
            await asyncio.sleep(0)
    outcomes = [each.result() for each in collecting]
    rows = batch_rows(run.id, step, outcomes)
    await asyncio.to_thread(_check_failures, run, step)
    await run.store.writer.append("batches", rows, step=step)
    run.pool.forget_groups()
    return await asyncio.to_thread(stored_digest, run.folder, step)


async def collect_group(collection: StepCollection, group: int) -> GroupOutcome:
    """One group: sample what is missing, score what is unscored, wait until all of it is stored, and judge it."""
    run, step, stored = collection.run, collection.step, collection.stored
    started = time.perf_counter()
    sampling = GroupPart(collection.sampler, await collection.missing(group))
    if sampling.work:
        run.recording.started()
        await rollout(sampling, step, str(group))
    rollouts = joined(where(stored.rollouts, "group", group), sampling.rows)
    old_scores = where(stored.scores, "group", group)
    scoring = ScorePart(
        collection.scorer, scorable(without(rollouts, "trajectory_id", values(old_scores, "trajectory_id")))
    )
    if scoring.rollouts.num_rows:
        run.recording.started()
        await score(scoring, step, str(group))
    await asyncio.gather(*sampling.acknowledgements, *scoring.acknowledgements)
    outcome = judge_group(
        run.config.score,
        group=group,
        env=run.environment.name,
        expected=run.config.rollout.group_size,
        survivors=survivors_of(rollouts, joined(old_scores, scoring.rows)),
    )
    if group not in stored.done_groups:
        await run.store.writer.append(
            "groups", group_row(run.id, step, outcome, time.perf_counter() - started), step=step
        )
    return outcome


def _check_failures(run: Run, step: int) -> None:
    """Stop the run when its environment or its servers fail too often.

    Raises:
        FailedShareError: more failed than `rollout.max_failed_share` allows; says what failed most.
    """
    rows = rows_of(read(run.folder, "rollouts", ["status", "error_type", "error"], step=step))
    failed = where(rows, "status", "failed")
    share, allowed = failed.num_rows / max(1, rows.num_rows), run.config.rollout.max_failed_share
    if share > allowed:
        (kind, n), *_ = Counter(values(failed, "error_type")).most_common(1)
        example = values(where(failed, "error_type", kind), "error")[0]
        raise FailedShareError(
            f"step {step}: {failed.num_rows} of {rows.num_rows} trajectories failed, rollout.max_failed_share allows "
            f"{allowed:g}; {n} times {kind}, for example: {example}"
        )
