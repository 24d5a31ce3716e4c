"""Held-out evaluation of a policy version: each prompt greedy and sampled, by the rollouts and scores of a step."""

import asyncio
import math
from collections.abc import Awaitable, Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.utilities.annotations import quote

from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.live_run import Run, TrainingRun
from rollmill.flows.run.run_sinks import evaluation_points
from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.tasks.observe.spans import span, within
from rollmill.tasks.rollout.admission import EVALUATION, SlotTicket
from rollmill.tasks.rollout.environment import Example
from rollmill.tasks.rollout.environment_calls import fetch_problem
from rollmill.tasks.rollout.task import RolloutChunk, StepSampler
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.rollout.trajectory_requests import group_deadline, sampling_seed, split_chunks
from rollmill.tasks.score.scoring import select_scorable
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import Rows, column_values
from rollmill.tasks.store.schemas import make_batch

# Group numbers of held-out prompts begin here, above those of any step.
HELD_OUT_GROUP = 1 << 40

# Held-out prompts of one task run: more task runs cost Prefect time and show nothing that the table does not.
PROMPTS_PER_TASK = 64


def is_due(run: TrainingRun, version: int) -> bool:
    """Return True if a version is to be evaluated: a multiple of `evaluate.every`, 0 included, or the last version.

    With `evaluate.every` 0 none is, nor is a version before the first step of a forked run.
    """
    every = run.config.evaluate.every
    if not every or version < run.store.manifest.first_step:
        return False
    return version % every == 0 or version == run.config.steps


def is_evaluated(run: TrainingRun, version: int) -> bool:
    """Return True if every held-out trajectory of a version is stored."""
    stored = read(run.folder, "evaluations", columns=["trajectory_id"], version=version)
    return bool(stored.num_rows >= 2 * run.config.evaluate.n_prompts)


async def evaluate_version(run: Run, version: int, after: Sequence[object] = ()) -> None:
    """Sample and score the held-out prompts with a policy version, if `evaluate.every` asks for it; returns when all is stored.

    Args:
        run: the run.
        version: the policy version, which the servers have.
        after: results of the task runs that the evaluation follows in Prefect's graph.
    """
    if is_due(run, version):
        await finish_evaluation(run, version, after)


async def finish_evaluation(run: Run, version: int, after: Sequence[object] = ()) -> None:
    """Sample and score a version's held-out trajectories that are not stored; send mean rewards to TensorBoard and MLflow.

    Args:
        run: the run.
        version: the policy version, which the servers have.
        after: results of the task runs that the evaluation follows in Prefect's graph.
    """
    stored = await asyncio.to_thread(
        read, run.folder, "evaluations", columns=["trajectory_id"], version=version
    )
    done = set(stored["trajectory_id"].to_pylist())
    work = [each for each in await plan_held_out(run, version) if each.trajectory_id not in done]
    failures = FailureWatch(version, len(work), max_share=1.0, logger=get_run_logger)
    if work:
        run.recording.count_start()
        # Without quote, Prefect would search all that a run consists of for the results of tasks.
        await evaluate_held_out(quote(run), version, quote(work), quote(failures), wait_for=after)
    if failures.n_failed:
        say(
            f"evaluation of version {version}: {failures.n_failed} of {len(work)} trajectories failed, which count as "
            "reward 0"
        )
    if run.sinks is not None:
        for point in await asyncio.to_thread(lambda: list(evaluation_points(run.folder, version))):
            # Sinks drop points that they have, so an evaluation that was stored before may be sent again.
            run.sinks.put(point)


@task(
    name="evaluation",
    task_run_name="version {version} / evaluation",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
async def evaluate_held_out(
    run: Run, version: int, work: Sequence[TrajectoryRequest], failures: FailureWatch
) -> None:
    """Sample and score held-out trajectories, PROMPTS_PER_TASK of them in each task run."""

    async def evaluate_chunk(number: int, chunk: Sequence[TrajectoryRequest]) -> None:
        with (
            within(lane=f"evaluate.{version}/{number}"),
            run.admission.request_slots(len(chunk), (version, EVALUATION)) as tickets,
        ):
            # A task run that waits for a slot would look in Prefect as if it were sampling.
            await tickets[0].wait()
            run.recording.count_start()
            with span("recording"):
                work = quote((run, chunk, tickets, failures))
                await evaluate_prompts(work, version, number, wait_for=())

    async with asyncio.TaskGroup() as fan_out:
        for number, chunk in enumerate(split_chunks(work, PROMPTS_PER_TASK)):
            fan_out.create_task(evaluate_chunk(number, chunk))
            # Prefect's work for a task run blocks the event loop: rollouts of the next step run in between.
            await asyncio.sleep(0)


async def plan_held_out(run: Run, version: int) -> list[TrajectoryRequest]:
    """Return two requests for each held-out prompt, greedy and sampled; prompts and seeds are the same for all versions."""
    problems: list[tuple[Example, Exception | None]] = []
    timeout_s = run.config.rollout.trajectory_timeout_s
    for part in split_chunks(range(run.config.evaluate.n_prompts), PROMPTS_PER_TASK):
        asked = (fetch_problem(run.environment, "held_out", prompt, timeout_s) for prompt in part)
        problems += await asyncio.gather(*asked)
    return [
        TrajectoryRequest(
            trajectory_id=f"{run.id}.v{version}.{prompt}.{'greedy' if greedy else 'sampled'}",
            group=HELD_OUT_GROUP + prompt,
            sample=0 if greedy else 1,
            attempt=0,
            example=example,
            # The same for every version, so that two evaluations differ by the policy alone.
            seed=sampling_seed(run.config.seed, HELD_OUT_GROUP + prompt, 0),
            temperature=0.0 if greedy else run.config.rollout.temperature,
            missing=missing,
        )
        for greedy in (True, False)
        for prompt, (example, missing) in enumerate(problems)
    ]


@task(
    name="evaluate",
    task_run_name="version {version} / evaluate {number}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
async def evaluate_prompts(
    work: tuple[Run, Sequence[TrajectoryRequest], Sequence[SlotTicket], FailureWatch],
    version: int,
    number: int,
) -> State[None]:
    """Sample, score and store a part of the held-out trajectories; the returned state's message has their number."""
    run, requests, tickets, failures = work
    async with asyncio.TaskGroup() as scoring:

        def score_and_store(rollouts: Rows) -> Awaitable[None]:
            # At once and not when the chunk is sampled: after a kill, what is stored is not sampled again.
            return scoring.create_task(_score_and_store(run, version, rollouts, failures))

        sampler = StepSampler(
            run.player, run.admission, run.id, version, store_rollouts=score_and_store, on_lost=failures.see
        )
        # Held-out prompts form no group: each has its own time limit alone.
        await RolloutChunk(sampler, requests, tickets, group_deadline(math.inf)).sample()
    for each in requests:
        run.pool.forget(each.group)
    return Completed(message=f"{len(requests)} trajectories")


async def _score_and_store(run: Run, version: int, rollouts: Rows, failures: FailureWatch) -> None:
    """Score rollouts and store each with its score, or its error, in the data set `evaluations`."""
    ids = column_values(rollouts, "trajectory_id")
    # Others of the chunk are scored concurrently, and spans of one lane must not overlap.
    with within(lane=f"evaluate.{version}/{short_id(str(ids[0]))}"), span("scoring"):
        scores = await run.held_out_scoring.score(select_scorable(rollouts), step=version)
    failures.see(scores)
    by_id = {row["trajectory_id"]: row for row in scores.to_pylist()}
    nothing = {"reward": math.nan, "components": "{}", "error_type": "", "error": ""}
    found = [by_id.get(trajectory_id, nothing) for trajectory_id in ids]
    columns: dict[str, object] = {name: rollouts.column(name) for name in rollouts.schema.names}
    for name in ("error_type", "error"):
        # The rollout's error, or its score's where the rollout has none.
        columns[name] = [
            own or row[name] for own, row in zip(column_values(rollouts, name), found, strict=True)
        ]
    columns |= {name: [row[name] for row in found] for name in ("reward", "components")} | {
        "policy_version": [version] * len(ids),
        "greedy": [temperature == 0.0 for temperature in column_values(rollouts, "temperature")],
    }
    await run.store.writer.append("evaluations", make_batch("evaluations", columns), version=version)
