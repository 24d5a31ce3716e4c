"""Held-out evaluation of a policy version: each prompt greedy and sampled, by the rollouts and scores of a step."""

import asyncio
import math
from bisect import bisect_right
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.utilities.annotations import quote

from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.live_run import Run, TrainingRun
from rollmill.flows.run.run_environment import RunEnvironment
from rollmill.flows.run.run_sinks import evaluation_points
from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.tasks.observe.spans import span, within
from rollmill.tasks.rollout.admission import EVALUATION, SlotTicket
from rollmill.tasks.rollout.environment import Example
from rollmill.tasks.rollout.environment_calls import fetch_problem
from rollmill.tasks.rollout.task import RolloutChunk, StepSampler
from rollmill.tasks.rollout.trajectory import NO_VERSION, TrajectoryRequest
from rollmill.tasks.rollout.trajectory_requests import group_deadline, sampling_seed, split_chunks
from rollmill.tasks.score.scoring import Scoring, select_scorable
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.held_out_counts import count_held_out
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.rows import (
    Rows,
    column_values,
    concat_rows,
    rows_from_table,
    rows_where,
    rows_where_in,
    rows_without,
)
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
    return bool(stored.num_rows >= sum(count_held_out(run.config.model_dump(mode="json")).values()))


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
    """Sample and score a version's held-out trajectories that are not stored; send mean rewards to the sinks.

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
    _say_failed(run, version, failures, len(work))
    if work and not await asyncio.to_thread(is_evaluated, run, version):
        say(
            f"evaluation of version {version} is incomplete: servers got the next version while they sampled it; `rollmill evaluate "
            f"{run.folder.location} --version {version}` completes it if the version has a checkpoint"
        )
    await _send_points(run, version)


async def _send_points(run: Run, version: int, *, is_new: bool = False) -> None:
    """Send a version's figures to the sinks, which drop points that they have, unless these are new."""
    if run.sinks is not None:
        for point in await asyncio.to_thread(lambda: list(evaluation_points(run.folder, version))):
            run.sinks.put(replace(point, is_new=is_new))


def _say_failed(run: Run, version: int, failures: FailureWatch, n: int) -> None:
    if failures.n_failed:
        say(
            f"evaluation of version {version}: {failures.n_failed} of {n} trajectories failed, which count as reward 0; "
            f"see rollmill inspect {run.folder.location} --evaluations --status failed,unscored"
        )


async def redo_failed_scores(run: Run) -> None:
    """Score stored held-out answers again whose score failed, of all versions; nothing is sampled."""
    names = [each.name for each in run.environments]
    for version in await asyncio.to_thread(list_steps, run.folder, "evaluations"):
        stored = rows_from_table(await asyncio.to_thread(read, run.folder, "evaluations", version=version))
        # The error of an answer that can be scored is that of its score.
        failed = rows_without(select_scorable(stored), "error_type", [""])
        # A fork has rows of environments that it has no more; their answers stay.
        failed = rows_where_in(failed, "env", names)
        if not failed.num_rows:
            continue
        say(f"evaluation of version {version}: {failed.num_rows} failed scores are redone")
        failures = FailureWatch(version, failed.num_rows, max_share=1.0, logger=get_run_logger)
        redone = [
            await _score(environment.held_out_scoring, version, rows, failures)
            for environment in run.environments
            if (rows := rows_where(failed, "env", environment.name)).num_rows
        ]
        _say_failed(run, version, failures, failed.num_rows)
        kept = rows_without(stored, "trajectory_id", column_values(failed, "trajectory_id"))
        await run.store.writer.replace("evaluations", concat_rows(kept, *redone), version=version)
        await _send_points(run, version, is_new=True)


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
            run.held_out_admission.request_slots(len(chunk), (version, EVALUATION)) as tickets,
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
    """Return a greedy request for each held-out prompt, and `evaluate.samples` sampled ones, of all environments.

    Prompts and seeds are the same for all versions. The prompts of an environment are numbered after those of the ones before it.
    """
    requests: list[TrajectoryRequest] = []
    first = 0
    for environment in run.environments:
        problems = await _fetch_problems(environment)
        config = environment.config
        sampled = range(1, 1 + config.evaluate.samples)
        requests += [
            TrajectoryRequest(
                trajectory_id=f"{run.id}.v{version}.{prompt}.{_answer_name(sample)}",
                group=HELD_OUT_GROUP + prompt,
                sample=sample,
                attempt=0,
                example=example,
                # The same for every version, so that two evaluations differ by the policy alone.
                seed=sampling_seed(config.seed, HELD_OUT_GROUP + prompt, max(0, sample - 1)),
                temperature=(config.evaluate.temperature or config.rollout.temperature) if sample else 0.0,
                missing=missing,
            )
            for sample in (0, *sampled)
            for prompt, (example, missing) in enumerate(problems, first)
        ]
        first += len(problems)
    return requests


async def _fetch_problems(environment: RunEnvironment) -> list[tuple[Example, Exception | None]]:
    problems: list[tuple[Example, Exception | None]] = []
    timeout_s = environment.config.rollout.trajectory_timeout_s
    for part in split_chunks(range(environment.config.evaluate.n_prompts), PROMPTS_PER_TASK):
        asked = (fetch_problem(environment.environment, "held_out", prompt, timeout_s) for prompt in part)
        problems += await asyncio.gather(*asked)
    return problems


def _answer_name(sample: int) -> str:
    """Return the end of a held-out trajectory's id. Example: samples 0 to 2 are greedy, sampled and sampled2."""
    return "greedy" if not sample else "sampled" if sample == 1 else f"sampled{sample}"


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

        def score_and_store(scorer: Scoring, rollouts: Rows) -> Awaitable[None]:
            # At once and not when the chunk is sampled: after a kill, what is stored is not sampled again.
            return scoring.create_task(_score_and_store(run, scorer, version, rollouts, failures))

        with run.store.writer.expect_rows():
            async with asyncio.TaskGroup() as sampling:
                for environment, places in _by_environment(run, requests):
                    sampler = StepSampler(
                        environment.player,
                        run.held_out_admission,
                        run.id,
                        version,
                        store_rollouts=partial(score_and_store, environment.held_out_scoring),
                        on_lost=failures.see,
                        env=environment.name,
                    )
                    own = [requests[place] for place in places], [tickets[place] for place in places]
                    # Held-out prompts form no group: each has its own time limit alone.
                    chunk = RolloutChunk(sampler, *own, group_deadline(math.inf))
                    sampling.create_task(chunk.sample())
    for each in requests:
        run.pool.forget(each.group)
    return Completed(message=f"{len(requests)} trajectories")


def _by_environment(
    run: Run, requests: Sequence[TrajectoryRequest]
) -> Iterator[tuple[RunEnvironment, list[int]]]:
    """Yield each environment of some held-out requests, with the places of its requests."""
    ends = list(accumulate(each.config.evaluate.n_prompts for each in run.environments))
    found: dict[int, list[int]] = {}
    for place, request in enumerate(requests):
        found.setdefault(bisect_right(ends, request.group - HELD_OUT_GROUP), []).append(place)
    for at, places in found.items():
        yield run.environments[at], places


async def _score_and_store(
    run: Run, scoring: Scoring, version: int, rollouts: Rows, failures: FailureWatch
) -> None:
    """Score rollouts and store each with its score, or its error, in the data set `evaluations`.

    What another version sampled is left out: a server that failed may return with the next one.
    """
    rollouts = rows_where_in(rollouts, "policy_version_last", (version, NO_VERSION))
    if not rollouts.num_rows:
        return
    with run.store.writer.expect_rows():
        rows = await _score(scoring, version, rollouts, failures)
    await run.store.writer.append("evaluations", rows, version=version)


async def _score(scoring: Scoring, version: int, rollouts: Rows, failures: FailureWatch) -> Rows:
    """Score rollouts, or rows of `evaluations` again; return a row of `evaluations` for each, with its score or its error."""
    ids = column_values(rollouts, "trajectory_id")
    # Others of the chunk are scored concurrently, and spans of one lane must not overlap.
    with within(lane=f"evaluate.{version}/{short_id(str(ids[0]))}"), span("scoring"):
        scores = await scoring.score(select_scorable(rollouts), step=version)
    failures.see(scores)
    by_id = {row["trajectory_id"]: row for row in scores.to_pylist()}
    nothing = {"reward": math.nan, "components": "{}"}
    found = [by_id.get(trajectory_id, nothing) for trajectory_id in ids]
    columns: dict[str, object] = {name: rollouts.column(name) for name in rollouts.schema.names}
    for name in ("error_type", "error"):
        # The score's error, or the rollout's where it has no score: a rollout that is scored has no error.
        columns[name] = [
            row.get(name, own) for own, row in zip(column_values(rollouts, name), found, strict=True)
        ]
    columns |= {name: [row[name] for row in found] for name in ("reward", "components")} | {
        "policy_version": [version] * len(ids),
        "greedy": [temperature == 0.0 for temperature in column_values(rollouts, "temperature")],
    }
    return make_batch("evaluations", columns)
