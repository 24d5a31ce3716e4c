"""The report of a step: what it lost and why, metrics in the data set, a line on the terminal, artifacts."""

import asyncio
import math
from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
from prefect.runtime import flow_run

from rollmill.flows.prefect_integration.links import flow_run_page
from rollmill.flows.prefect_integration.private_prefect import release_finished_tasks
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.live_run import Run, TrainingRun
from rollmill.flows.run.run_environment import CUT_PROMPTS, environment_metrics, merge_metrics
from rollmill.flows.step.lost_trajectories import StoredStepRows, drop_line, drop_metrics, find_drops
from rollmill.flows.step.step_collection import CollectedStep
from rollmill.tasks.look.tables.view import count_noun
from rollmill.tasks.look.terminal.run_summary import print_summary
from rollmill.tasks.observe.metrics import ALL, Metric
from rollmill.tasks.observe.sinks.metric_sinks import make_points
from rollmill.tasks.observe.spans import record_span, span
from rollmill.tasks.observe.step_clock import StepClock
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.group_draw import StoredGroup
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.run.group_ranges import group_numbers, read_plan, replayed_groups
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.stored_batch import select_own_rows
from rollmill.tasks.train.service.answers import StepResult


def train_metrics(result: StepResult) -> list[Metric]:
    """Return the trainer's metrics of a step, whether it made an update, and the reason if it made none."""
    metrics = [*result.metrics, Metric("train/updated", "all", "value", float(result.updated))]
    if not result.updated:
        metrics.append(Metric(f"train/skipped_{result.reason.replace(' ', '_')}", "all", "value", 1.0))
    return metrics


@record_span("report")
async def report_step(
    run: Run, collected: CollectedStep, metrics: Sequence[Metric], clock: StepClock
) -> None:
    """Store a step's metrics, and show its reward, lost trajectories and time on the terminal and in Prefect's UI."""
    step = collected.step
    with span("measuring"):
        measured, dropped = await asyncio.to_thread(_measure, run, step)
    reward, n_tokens = (
        next(each.value for each in measured if (each.name, each.env) == (name, ALL))
        for name in ("rollout/reward", "rollout/tokens")
    )
    values = {
        "time/rollouts_and_scores_s": collected.seconds,
        "observe/sink_failures_so_far": float(run.sinks.n_failures if run.sinks else 0),
        "store/compaction_failures_so_far": float(run.compactor.n_failed),
    }
    services = merge_metrics(
        [*environment_metrics(run.environments), *run.pool.metrics(), *await run.executor.end_step(step)]
    )
    n_cut = next((each.value for each in services if each.name == CUT_PROMPTS), 0.0)
    cut = f"{n_cut:.0f} prompts cut so far" if n_cut else ""
    n_replayed = next((each.value for each in measured if each.name == "rollout/replayed_groups"), None)
    replayed = "" if n_replayed is None else f"{n_replayed:.0f} stored groups"
    own = [*measured, *(Metric(name, ALL, "value", value) for name, value in values.items())]
    seconds = await store_step(run, step, [*metrics, *own, *services], clock)
    run.progress.step_done(
        step,
        reward=reward,
        # What an earlier process stored took other seconds.
        tokens_per_s=max(0.0, n_tokens - collected.stored_tokens) / collected.seconds,
        seconds=seconds,
        dropped=", ".join(filter(None, (replayed, drop_line(dropped), cut))),
    )
    run.artifacts.step_done(step, run.scores_key, collected.task_run_id)
    # Prefect keeps what ended task runs returned until the flow ends, and memory would grow with each step.
    release_finished_tasks()


def _measure(run: Run, step: int) -> tuple[list[Metric], pl.DataFrame]:
    """Compute a step's metrics, of each environment too if there are several, and the rows of `find_drops`."""
    stored = StoredStepRows.read(run.folder, step, run.scores_key)
    plan = read_plan(run.folder, step)
    refills = group_numbers([each for each in plan if each.reason == "refill"])
    fates = find_drops(stored, train_truncated=run.config.score.train_truncated)
    metrics = [*_measure_rows(stored.rollouts, stored.groups, refills, ALL), *drop_metrics(fates)]
    if replayed := replayed_groups(plan).values():
        metrics += _measure_replay(run.folder, step, [each for each in replayed if not each.source])
    names = [each.name for each in run.environments]
    for env in names if len(names) > 1 else ():
        of_env = pl.col("env") == env
        rows = stored.rollouts.filter(of_env), stored.groups.filter(of_env)
        metrics += [*_measure_rows(*rows, refills, env), *drop_metrics(fates.filter(of_env), env)]
    return metrics, fates


def _measure_rows(
    rollouts: pl.DataFrame, groups: pl.DataFrame, refills: Sequence[int], env: str
) -> Iterator[Metric]:
    """Yield the metrics of some rollouts and groups of a step under the label `env`."""
    rewards, trained = groups["reward_mean"].drop_nans(), groups.filter(pl.col("reason") == "")
    measured = {
        "rollout/reward": float(np.mean(rewards.to_numpy())) if len(rewards) else math.nan,
        "rollout/tokens": float(rollouts["n_completion_tokens"].sum()),
        "rollout/failed": float((rollouts["status"] == "failed").sum()),
        "rollout/groups": float(groups["group"].n_unique()),
        "rollout/groups_trained": float(trained["group"].n_unique()),
        "rollout/refill_groups": float(rollouts.filter(pl.col("group").is_in(refills))["group"].n_unique()),
        "rollout/refill_trajectories": float(rollouts["group"].is_in(refills).sum()),
    }
    yield from (Metric(name, env, "value", value) for name, value in measured.items())


def _measure_replay(folder: RunFolder, step: int, own: Sequence[StoredGroup]) -> Iterator[Metric]:
    """Yield the metrics of the stored groups that a step trained on; `own` are those that the run itself sampled."""
    batch = scan(folder, "batches", ["step", "group", "source", "source_step"], step=step)
    fresh = select_own_rows(batch).select(pl.col("group").n_unique()).collect().item()
    n = batch.select(pl.col("group").n_unique()).collect().item() - fresh
    measured = {"rollout/replayed_groups": float(n), "rollout/replayed_share": n / max(1, n + fresh)}
    if own:
        measured["rollout/replayed_steps_ago"] = float(np.mean([step - each.step for each in own]))
    yield from (Metric(name, ALL, "value", value) for name, value in measured.items())


async def store_step(run: TrainingRun, step: int, metrics: Sequence[Metric], clock: StepClock) -> float:
    """Store a step's spans, and its metrics together with its phases' seconds and this process's lag and memory.

    Returns the step's seconds until then, `time/step_s`.
    """
    seconds = {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
    seconds["time/step_s"] = clock.elapsed_s
    own = [Metric(name, "all", "value", value) for name, value in seconds.items()]
    with span("storing"):
        await run.store.spans.store(step)
    with span("measuring"):
        vitals = await run.vitals.measure_step()
    with span("storing"):
        await store_metrics(run, step, [*metrics, *own, run.store.spans.count_lost(), *vitals])
        # Only shards that the inventory names are missed when they are lost.
        await run.store.writer.note()
    return seconds["time/step_s"]


async def store_metrics(run: TrainingRun, step: int, metrics: Sequence[Metric]) -> None:
    """Store a step's metrics in the data set `metrics`, and send them to the sinks."""
    rows = make_batch(
        "metrics",
        {
            "run": [run.id] * len(metrics),
            "step": [step] * len(metrics),
            "name": [metric.name for metric in metrics],
            "env": [metric.env for metric in metrics],
            "stat": [metric.stat for metric in metrics],
            "value": [metric.value for metric in metrics],
        },
    )
    await run.store.writer.store("metrics", rows, step=step)
    if run.sinks is not None:
        for point in make_points(step, metrics):
            run.sinks.put(point)


def has_metrics(run: TrainingRun, step: int) -> bool:
    """Return True if the metrics of a step's training are in the data set `metrics`."""
    stored = scan(run.folder, "metrics", ["name"], step=step).filter(pl.col("name") == "train/updated")
    return stored.limit(1).collect().height > 0


def count_skipped_steps(run: TrainingRun, version: int) -> int:
    """Count the consecutive steps without an update that led to a policy version, by their metrics."""
    for step in reversed(range(version)):
        stored = scan(run.folder, "metrics", ["name", "value"], step=step)
        updated = stored.filter(pl.col("name") == "train/updated").collect()["value"]
        if not len(updated) or updated[-1]:
            return version - 1 - step
    return version


@record_span("report")
async def report_run(run: TrainingRun) -> None:
    """End a finished run: store its last spans, print a summary, compact its data sets, and mark run.json finished."""
    await run.store.spans.store(run.config.steps - 1)
    run.artifacts.run_done()
    await asyncio.to_thread(print_summary, run.folder, flow_run_page(flow_run.id or ""))
    async with asyncio.TaskGroup() as closing:
        closing.create_task(run.compactor.finish())
        recorded = closing.create_task(run.recording.wait_until_recorded())
    if left := recorded.result():
        say(f"Prefect has not recorded {count_noun(left, 'task run')} in time")
    await asyncio.to_thread(run.store.finish)
