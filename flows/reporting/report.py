"""What a step leaves behind for people: metrics in the data set, a line at the bar, artifacts in the UI."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import polars as pl
from prefect.runtime import flow_run

from flows.groups.fan_out import Collected
from flows.looking.view import counted
from flows.reporting.drops import drop_line, drop_metrics, drops
from flows.reporting.step_rows import StepRows
from flows.reporting.summary import print_summary
from flows.running.run import Run, TrainingRun
from flows.ui.links import flow_run_page
from flows.ui.progress import say
from flows.ui.recording import forget_results
from flows.ui.step_runs import name_of_step
from tasks.observe.metrics import Metric
from tasks.observe.sinks import points_of
from tasks.observe.spans import span, spanned
from tasks.observe.step_clock import StepClock
from tasks.rollout.env_client import RemoteEnvironment
from tasks.store.plan import group_numbers, read_plan
from tasks.store.reader import scan
from tasks.store.schemas import batch_of
from tasks.train.protocol import StepResult


def train_metrics(result: StepResult) -> list[Metric]:
    """What the trainer measured, whether it made an update, and the reason when it made none."""
    metrics = [*result.metrics, Metric("train/updated", "all", "value", float(result.updated))]
    if not result.updated:
        metrics.append(Metric(f"train/skipped_{result.reason.replace(' ', '_')}", "all", "value", 1.0))
    return metrics


@spanned("report")
async def report_step(run: Run, collected: Collected, metrics: Sequence[Metric], clock: StepClock) -> None:
    """Store the step's metrics and show it."""
    step = collected.step
    with span("measuring"):
        reward, measured, dropped = await asyncio.to_thread(_measure, run, step)
    measured |= {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
    measured |= {"time/step_s": clock.elapsed_s, "time/rollouts_and_scores_s": collected.seconds}
    own = [Metric(name, "all", "value", value) for name, value in measured.items()]
    with span("storing"):
        await run.store.spans.store(step)
    services = [*run.scoring.metrics(), *run.pool.metrics(), run.store.spans.lost()]
    services.append(Metric("observe/sink_failures_so_far", "all", "value", float(run.sinks.n_failures)))
    services.append(Metric("store/compaction_failures_so_far", "all", "value", float(run.compactor.n_failed)))
    if isinstance(run.environment, RemoteEnvironment):
        restarts = float(run.environment.restarts)
        services.append(Metric("rollout/env_restarts_so_far", "all", "value", restarts))
    with span("measuring"):
        vitals = await run.vitals.of_step()
    with span("storing"):
        await store_metrics(run, step, [*metrics, *own, *services, *drop_metrics(dropped), *vitals])
        await run.store.writer.note()
    run.progress.step_done(
        step,
        reward=reward,
        tokens_per_s=measured["rollout/tokens"] / collected.seconds,
        seconds=clock.elapsed_s,
        dropped=drop_line(dropped),
    )
    run.artifacts.step_done(step, run.scoring.key, run.step_runs.taken_id(name_of_step(step)))
    forget_results()


def _measure(run: Run, step: int) -> tuple[float, dict[str, float], pl.DataFrame]:
    """Mean reward of a step's groups (NaN without any), its metrics by name, and the fate of each trajectory."""
    stored = StepRows.read(run.folder, step, run.scoring.key)
    refills = group_numbers([each for each in read_plan(run.folder, step) if each.reason == "refill"])
    rollouts, reasons = stored.rollouts, stored.groups["reason"]
    rewards = stored.groups["reward_mean"].drop_nans()
    reward = float(np.mean(rewards.to_numpy())) if len(rewards) else math.nan
    measured = {
        "rollout/reward": reward,
        "rollout/tokens": float(rollouts["n_completion_tokens"].sum()),
        "rollout/failed": float((rollouts["status"] == "failed").sum()),
        "rollout/groups_trained": float((reasons == "").sum()),
        "rollout/refill_groups": float(len(refills)),
        "rollout/refill_trajectories": float(rollouts["group"].is_in(refills).sum()),
    }
    return reward, measured, drops(stored, train_truncated=run.config.score.train_truncated)


async def store_metrics(run: TrainingRun, step: int, metrics: Sequence[Metric]) -> None:
    """Append metrics of a step to the data set."""
    rows = batch_of(
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
    await run.store.writer.append("metrics", rows, step=step)
    for point in points_of(step, metrics):
        run.sinks.put(point)


def has_metrics(run: TrainingRun, step: int) -> bool:
    """True when the training of a step is in the metrics data set."""
    stored = scan(run.folder, "metrics", ["name"], step=step).filter(pl.col("name") == "train/updated")
    return stored.limit(1).collect().height > 0


@spanned("report")
async def report_run(run: TrainingRun) -> None:
    """Close the run's books: its last spans, its page in the UI, its data sets compacted, its task runs recorded, its manifest finished."""
    await run.store.spans.store(run.config.steps - 1)
    run.artifacts.run_done()
    await asyncio.to_thread(print_summary, run.folder, flow_run_page(flow_run.id or ""))
    async with asyncio.TaskGroup() as closing:
        closing.create_task(run.compactor.finish())
        recorded = closing.create_task(run.recording.wait_until_recorded())
    if left := recorded.result():
        say(f"Prefect has not recorded {counted(left, 'task run')} within observe.record_timeout_s")
    await asyncio.to_thread(run.store.finish)
