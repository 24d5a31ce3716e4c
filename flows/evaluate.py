"""A policy against held-out prompts, greedy and sampled."""

import asyncio
import math
from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.run import Run
from tasks.rollout.admission import EVALUATION, Place
from tasks.rollout.environment import Example
from tasks.rollout.group import parts_of
from tasks.rollout.prompts import sampling_seed
from tasks.rollout.trajectory import Trajectory, Work, rollout_columns, rollout_rows
from tasks.score.scoring import scorable
from tasks.store.reader import read
from tasks.store.rows import rows_of, values
from tasks.store.schemas import batch_of

HELD_OUT_GROUP = 1 << 40
"""Group numbers of held-out prompts begin here, above those of any step."""


def is_due(run: Run, version: int) -> bool:
    """True for versions that are multiples of `evaluate.every`, and for the last one."""
    return version % run.config.evaluate.every == 0 or version == run.config.steps


def is_evaluated(run: Run, version: int) -> bool:
    """True when every held-out trajectory of a version is stored."""
    stored = read(run.folder, "evaluations", columns=["trajectory_id"], version=version)
    return bool(stored.num_rows >= 2 * run.config.evaluate.n_prompts)


async def evaluate_version(run: Run, version: int) -> None:
    """Sample and score what is missing of a version's evaluation, if it is due; what is stored is kept."""
    if not is_due(run, version):
        return
    stored = rows_of(read(run.folder, "evaluations", columns=["trajectory_id"], version=version))
    done = set(values(stored, "trajectory_id"))
    work = [each for each in await held_out_work(run, version) if each.trajectory_id not in done]
    async with asyncio.TaskGroup() as fan_out:
        for number, part in enumerate(parts_of(work, run.config.evaluate.prompts_per_task)):
            fan_out.create_task(_evaluate_part(run, version, part, number))
            await asyncio.sleep(0)


async def _evaluate_part(run: Run, version: int, work: Sequence[Work], number: int) -> None:
    """Begin a part's task run once its first trajectory may begin."""
    with run.admission.places(len(work), (version, EVALUATION)) as places:
        await asyncio.shield(places[0].granted)
        run.recording.started()
        await evaluate(EvaluationPart(run, version, work, places), version, number)


async def held_out_work(run: Run, version: int) -> list[Work]:
    """Each held-out prompt twice, greedy and sampled; the same prompts and seeds for every version."""
    examples: list[Example] = []
    for part in parts_of(range(run.config.evaluate.n_prompts), run.config.evaluate.prompts_per_task):
        asked = (run.environment.example("held_out", prompt) for prompt in part)
        examples += await asyncio.gather(*asked)
    return [
        Work(
            trajectory_id=f"{run.id}.v{version}.{prompt}.{'greedy' if greedy else 'sampled'}",
            group=HELD_OUT_GROUP + prompt,
            sample=0 if greedy else 1,
            attempt=0,
            example=example,
            seed=sampling_seed(run.config.seed, HELD_OUT_GROUP + prompt, 0),
            temperature=0.0 if greedy else run.config.rollout.temperature,
        )
        for greedy in (True, False)
        for prompt, example in enumerate(examples)
    ]


class EvaluationPart:
    """Held-out prompts that one task run samples and scores."""

    __slots__ = ("places", "run", "version", "work")

    def __init__(self, run: Run, version: int, work: Sequence[Work], places: Sequence[Place]) -> None:
        self.run, self.version, self.work, self.places = run, version, work, places

    async def evaluate(self) -> str:
        """Sample, score and store; returns the mean reward in words."""
        run = self.run
        async with asyncio.TaskGroup() as playing:
            tasks = [
                playing.create_task(self._play(*each)) for each in zip(self.work, self.places, strict=True)
            ]
        trajectories = [task.result() for task in tasks]
        for each in self.work:
            run.pool.forget(each.group)
        rollouts = rollout_rows(run.id, self.version, run.environment.name, trajectories)
        scores = await run.held_out_scoring.score(scorable(rollouts), step=self.version)
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

    async def _play(self, work: Work, place: Place) -> Trajectory:
        async with self.run.admission.slot(place):
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
