"""A policy against held-out prompts, greedy and sampled."""

import asyncio
import math
from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.run import Run
from tasks.rollout.prompts import sampling_seed
from tasks.rollout.trajectory import Trajectory, Work, rollout_columns, rollout_rows
from tasks.score.scoring import scorable, score_off_loop
from tasks.store.reader import read
from tasks.store.rows import rows_of, values
from tasks.store.schemas import batch_of

HELD_OUT_GROUP = 1 << 40
"""Group numbers of held-out prompts begin here, above those of any step."""


async def evaluate_version(run: Run, version: int) -> None:
    """Sample and score what is missing of a version's evaluation; what is stored is kept.

    Versions that are multiples of `evaluate.every` are due, and the last one.
    """
    if version % run.config.evaluate.every and version != run.config.steps:
        return
    stored = rows_of(read(run.folder, "evaluations", columns=["trajectory_id"], version=version))
    done = set(values(stored, "trajectory_id"))
    work = [each for each in await held_out_work(run, version) if each.trajectory_id not in done]
    size = run.config.evaluate.prompts_per_task
    async with asyncio.TaskGroup() as fan_out:
        for first in range(0, len(work), size):
            run.recording.started()
            part = EvaluationPart(run, version, work[first : first + size])
            fan_out.create_task(evaluate(part, version, first // size))
            await asyncio.sleep(0)


async def held_out_work(run: Run, version: int) -> list[Work]:
    """Each held-out prompt twice, greedy and sampled; the same prompts and seeds for every version."""
    return [
        Work(
            trajectory_id=f"{run.id}.v{version}.{prompt}.{'greedy' if greedy else 'sampled'}",
            group=HELD_OUT_GROUP + prompt,
            sample=0 if greedy else 1,
            attempt=0,
            example=await run.environment.example("held_out", prompt),
            seed=sampling_seed(run.config.seed, HELD_OUT_GROUP + prompt, 0),
            temperature=0.0 if greedy else run.config.rollout.temperature,
        )
        for greedy in (True, False)
        for prompt in range(run.config.evaluate.n_prompts)
    ]


class EvaluationPart:
    """Held-out prompts that one task run samples and scores."""

    __slots__ = ("run", "version", "work")

    def __init__(self, run: Run, version: int, work: Sequence[Work]) -> None:
        self.run, self.version, self.work = run, version, work

    async def evaluate(self) -> str:
        """Sample, score and store; returns the mean reward in words."""
        run = self.run
        trajectories = await asyncio.gather(*(self._play(each) for each in self.work))
        rollouts = rollout_rows(run.id, self.version, run.environment.name, trajectories)
        scores = await score_off_loop(
            run.score_executor,
            run.scorer,
            run.id,
            self.version,
            scorable(rollouts),
            run.config.score.timeout_s,
        )
        rewards = dict(zip(values(scores, "trajectory_id"), values(scores, "reward"), strict=True))
        components = dict(zip(values(scores, "trajectory_id"), values(scores, "components"), strict=True))
        ids = [each.trajectory_id for each in self.work]
        columns = rollout_columns(run.id, self.version, run.environment.name, trajectories) | {
            "policy_version": [self.version] * len(ids),
            "greedy": [each.temperature == 0.0 for each in self.work],
            "reward": [rewards.get(each, math.nan) for each in ids],
            "components": [components.get(each, "{}") for each in ids],
        }
        await run.store.writer.append("evaluations", batch_of("evaluations", columns), version=self.version)
        return f"{len(ids)} trajectories"

    async def _play(self, work: Work) -> Trajectory:
        async with self.run.admission:
            return await self.run.player.play(work)


@task(
    name="evaluate",
    task_run_name="version {version} / evaluate {number}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def evaluate(part: EvaluationPart, version: int, number: int) -> str:
    """Sample and score a part of the held-out prompts; the rows go to the data set."""
    return await part.evaluate()
