"""The fan-out of one step: every group's rollouts, scored the moment they are there, and the batch of them."""

import asyncio
import time

from flows.run import Run
from tasks.errors import FailedShareError
from tasks.rollout.group import GroupPart, StepSampler, group_work
from tasks.rollout.task import rollout
from tasks.rollout.trajectory import failures
from tasks.score.outcome import GroupOutcome, batch_rows, group_row, judge_group, survivors_of
from tasks.score.part import ScorePart, StepScorer
from tasks.score.scoring import scorable
from tasks.score.task import score
from tasks.store.rows import Rows, joined, values, where, without
from tasks.store.step import StoredStep


class StepCollection:
    """What the groups of one step share."""

    def __init__(self, run: Run, step: int, stored: StoredStep) -> None:
        self.run, self.step, self.stored = run, step, stored
        append = run.store.writer.append
        scorer = run.scorer
        self.sampler = StepSampler(
            player=run.player,
            admission=run.admission,
            run=run.id,
            step=step,
            keep=lambda rows: append("rollouts", rows, step=step),
        )
        self.scorer = StepScorer(
            scorer=scorer,
            executor=run.score_executor,
            timeout_s=run.config.score.timeout_s,
            run=run.id,
            step=step,
            keep=lambda rows: append("scores", rows, scorer=run.scorer_key, step=step),
        )


async def collect_step(run: Run, step: int) -> str:
    """Finish the step's rollouts, scores and groups, and store its batch; returns the batch's digest.

    What lies in the folder already is kept; only what is missing is generated.
    """
    groups = await run.plan(step)
    collection = StepCollection(run, step, StoredStep.read(run.folder, step, run.scorer_key))
    async with asyncio.TaskGroup() as fan_out:
        collecting = []
        for group in groups:
            await run.recording.hold_back()
            collecting.append(fan_out.create_task(collect_group(collection, group)))
            await asyncio.sleep(0)
    outcomes = [each.result() for each in collecting]
    rows = batch_rows(run.id, step, outcomes)
    await run.store.writer.append("batches", rows, step=step)
    return run.digest(step)


async def collect_group(collection: StepCollection, group: int) -> GroupOutcome:
    """One group: sample what is missing, score what is unscored, wait until all of it is stored, and judge it."""
    run, step, stored = collection.run, collection.step, collection.stored
    started = time.perf_counter()
    sampling = GroupPart(collection.sampler, _missing_work(run, group, where(stored.rollouts, "group", group)))
    if sampling.work:
        await rollout(sampling, step, group)
    rollouts = joined(where(stored.rollouts, "group", group), sampling.rows)
    old_scores = where(stored.scores, "group", group)
    scoring = ScorePart(collection.scorer, scorable(without(rollouts, "trajectory_id", values(old_scores, "trajectory_id"))))
    if scoring.rollouts.num_rows:
        await score(scoring, step, group)
    await asyncio.gather(*sampling.acknowledgements, *scoring.acknowledgements)
    outcome = judge_group(
        run.config.score,
        group=group,
        env=run.environment.name,
        expected=run.config.rollout.group_size,
        survivors=survivors_of(rollouts, joined(old_scores, scoring.rows)),
    )
    if group not in stored.done_groups:
        await run.store.writer.append("groups", group_row(run.id, step, outcome, time.perf_counter() - started), step=step)
    return outcome
