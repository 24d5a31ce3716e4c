"""A policy against held-out prompts, greedy and sampled."""

import asyncio
import math
from collections.abc import Awaitable, Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from flows.running.failures import FailureWatch
from flows.running.run import Run, TrainingRun
from flows.running.sinks import evaluations
from flows.ui.progress import say
from flows.ui.step_runs import name_of_evaluation
from tasks.observe.spans import span, within
from tasks.rollout.admission import EVALUATION, Place
from tasks.rollout.environment import Example
from tasks.rollout.foreign import problem_of
from tasks.rollout.group import parts_of
from tasks.rollout.prompts import sampling_seed
from tasks.rollout.trajectory import Trajectory, Work, rollout_columns, rollout_rows
from tasks.score.scoring import scorable
from tasks.store.attempts import short_id
from tasks.store.reader import read
from tasks.store.rows import Rows, rows_of, values
from tasks.store.schemas import batch_of

HELD_OUT_GROUP = 1 << 40
"""Group numbers of held-out prompts begin here, above those of any step."""


def is_due(run: TrainingRun, version: int) -> bool:
    """True for versions that are multiples of `evaluate.every`, and for the last one; a fork's own versions alone.

    Without `evaluate.enabled` none is.
    """
    if not run.config.evaluate.enabled or version < run.store.manifest.first_step:
        return False
    return version % run.config.evaluate.every == 0 or version == run.config.steps


def is_evaluated(run: TrainingRun, version: int) -> bool:
    """True when every held-out trajectory of a version is stored."""
    stored = read(run.folder, "evaluations", columns=["trajectory_id"], version=version)
    return bool(stored.num_rows >= 2 * run.config.evaluate.n_prompts)


async def evaluate_version(run: Run, version: int) -> None:
    """Evaluate a version, if it is due."""
    if is_due(run, version):
        await finish_evaluation(run, version)


async def finish_evaluation(run: Run, version: int) -> None:
    """Sample and score what is missing of a version's evaluation; what is stored is kept."""
    found = await asyncio.to_thread(
        read, run.folder, "evaluations", columns=["trajectory_id"], version=version
    )
    stored = rows_of(found)
    done = set(values(stored, "trajectory_id"))
    work = [each for each in await held_out_work(run, version) if each.trajectory_id not in done]
    failures = FailureWatch(version, len(work), max_share=1.0, logger=get_run_logger)
    if work:
        async with run.step_runs.of(name_of_evaluation(version)):
            await _evaluate_parts(run, version, work, failures)
    if failures.n_failed:
        say(
            f"evaluation of version {version}: {failures.n_failed} of {len(work)} trajectories failed, which count as "
            "reward 0"
        )
    for point in await asyncio.to_thread(lambda: list(evaluations(run.folder, version))):
        run.sinks.put(point)


async def _evaluate_parts(run: Run, version: int, work: Sequence[Work], failures: FailureWatch) -> None:
    async with asyncio.TaskGroup() as fan_out:
        for number, part in enumerate(parts_of(work, run.config.evaluate.prompts_per_task)):
            fan_out.create_task(_evaluate_part(run, version, part, number, failures))
            await asyncio.sleep(0)


async def _evaluate_part(
    run: Run, version: int, work: Sequence[Work], number: int, failures: FailureWatch
) -> None:
    """Begin a part's task run once its first trajectory may begin."""
    with (
        within(lane=f"evaluate.{version}/{number}"),
        run.admission.places(len(work), (version, EVALUATION)) as places,
    ):
        await places[0].turn()
        run.recording.started()
        with span("recording"):
            await evaluate(EvaluationPart(run, version, work, places, failures), version, number)


async def held_out_work(run: Run, version: int) -> list[Work]:
    """Each held-out prompt twice, greedy and sampled; the same prompts and seeds for every version."""
    problems: list[tuple[Example, Exception | None]] = []
    timeout_s = run.config.rollout.trajectory_timeout_s
    for part in parts_of(range(run.config.evaluate.n_prompts), run.config.evaluate.prompts_per_task):
        asked = (problem_of(run.environment, "held_out", prompt, timeout_s) for prompt in part)
        problems += await asyncio.gather(*asked)
    return [
        Work(
            trajectory_id=f"{run.id}.v{version}.{prompt}.{'greedy' if greedy else 'sampled'}",
            group=HELD_OUT_GROUP + prompt,
            sample=0 if greedy else 1,
            attempt=0,
            example=example,
            seed=sampling_seed(run.config.seed, HELD_OUT_GROUP + prompt, 0),
            temperature=0.0 if greedy else run.config.rollout.temperature,
            missing=missing,
        )
        for greedy in (True, False)
        for prompt, (example, missing) in enumerate(problems)
    ]


class EvaluationPart:
    """Held-out prompts that one task run samples and scores; what finished is stored while others are played."""

    __slots__ = ("failures", "places", "run", "version", "work")

    def __init__(
        self,
        run: Run,
        version: int,
        work: Sequence[Work],
        places: Sequence[Place],
        failures: FailureWatch,
    ) -> None:
        self.run, self.version, self.work, self.places, self.failures = run, version, work, places, failures

    async def evaluate(self) -> str:
        """Sample, score and store; returns how it went, in words."""
        acknowledgements: list[Awaitable[None]] = []
        with span("sampling"):
            async with asyncio.TaskGroup() as playing:
                unfinished = {
                    playing.create_task(self._play(*each))
                    for each in zip(self.work, self.places, strict=True)
                }
                while unfinished:
                    finished, unfinished = await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
                    acknowledgements.append(await self._keep([task.result() for task in finished]))
        with span("storing"):
            await asyncio.gather(*acknowledgements)
        for each in self.work:
            self.run.pool.forget(each.group)
        return f"{len(self.work)} trajectories"

    async def _play(self, work: Work, place: Place) -> Trajectory:
        with within(lane=short_id(work.trajectory_id)):
            async with self.run.admission.slot(place):
                return await self.run.player.play(work)

    async def _keep(self, trajectories: Sequence[Trajectory]) -> Awaitable[None]:
        """Score trajectories, all that finished while the ones before were scored, and hand them to the writer."""
        run, env = self.run, self.run.environment.name
        rollouts = rollout_rows(run.id, self.version, env, trajectories)
        self.failures.see(rollouts)
        with span("scoring"):
            scores = await run.held_out_scoring.score(scorable(rollouts), step=self.version)
        self.failures.see(scores)
        columns = rollout_columns(run.id, self.version, env, trajectories)
        columns |= _score_columns(scores, trajectories) | {
            "policy_version": [self.version] * len(trajectories),
            "greedy": [each.work.temperature == 0.0 for each in trajectories],
        }
        return run.store.writer.append("evaluations", batch_of("evaluations", columns), version=self.version)


def _score_columns(scores: Rows, trajectories: Sequence[Trajectory]) -> dict[str, object]:
    """Reward, components and error of each trajectory; the error is the score's where the rollout has none."""
    by_id = {row["trajectory_id"]: row for row in scores.to_pylist()}
    nothing = {"reward": math.nan, "components": "{}", "error_type": "", "error": ""}
    found = [by_id.get(each.work.trajectory_id, nothing) for each in trajectories]
    pairs = list(zip(trajectories, found, strict=True))
    return {
        "reward": [row["reward"] for row in found],
        "components": [row["components"] for row in found],
        "error_type": [each.error_type or row["error_type"] for each, row in pairs],
        "error": [each.error or row["error"] for each, row in pairs],
    }


@task(
    name="evaluate",
    task_run_name="version {version} / evaluate {number}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def evaluate(part: EvaluationPart, version: int, number: int) -> str:
    """Sample and score a part of the held-out prompts; the rows go to the data set."""
    return await part.evaluate()
