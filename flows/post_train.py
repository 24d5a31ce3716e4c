"""The main flow: for each step collect -> train -> sync -> report, and what may go on beside it."""

import asyncio

from prefect import flow

from flows.beside import Beside
from flows.checks.machine import check_machine
from flows.config import RunConfig
from flows.failure import one_error
from flows.groups.collector_runs import joined, open_collectors
from flows.groups.fan_out import store_batch
from flows.policies.policy import open_policy
from flows.policies.retention import drop_old_routing
from flows.reporting.report import report_run, report_step, train_metrics
from flows.rules import check
from flows.running.folder import RunName, check_resumable, run_folder
from flows.running.run import open_run
from flows.start_model import ensure_start_model
from flows.ui.cancelling import mark_cancelled
from flows.ui.pausing import pauses_between_steps
from flows.ui.terminating import ended_in_order
from tasks.observe.run_line import recorded
from tasks.observe.spans import span
from tasks.observe.step_clock import StepClock
from tasks.score.check import check_scorer


@flow(name="post-train", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
@recorded
async def post_train(run_name: RunName, config: RunConfig, redo_failed: bool = False) -> str:
    """Post-train a policy: sample, score, train and sync, step by step, from where the run's folder stands.

    Args:
        run_name: folder of the run below `store.root`; one that exists and is unfinished is gone on with.
        config: all settings.
        redo_failed: sample what failed of the steps without a batch again, as a further attempt.

    Returns:
        The run's folder.
    """
    with span("checking"):
        check(config)
        check_scorer(config.score, config.evaluate.scorer)
        await check_machine(config)
        await asyncio.to_thread(check_resumable, run_folder(run_name, config), config)
    with ended_in_order(), one_error(), pauses_between_steps(config.steps) as pauses:
        model = await ensure_start_model(config)
        async with (
            open_run(run_name, config, model, redo_failed=redo_failed) as run,
            open_collectors(run) as collectors,
            open_policy(run) as policy,
            Beside(run, collectors) as beside,
        ):
            first = await policy.restore()
            await drop_old_routing(run, first)
            beside.begin(first)
            for step in range(first, config.steps):
                with StepClock(step) as clock:
                    with clock.span("collect"):
                        collected = await beside.collected(step)
                    with clock.span("train"):
                        result = await policy.train(step, await store_batch(run, collected))
                    with clock.span("evaluate"):
                        await beside.evaluated(step)
                    with clock.span("sync"):
                        synced = await policy.sync(only_name=not result.updated)
                    if not pauses.is_due(step + 1):
                        beside.begin(step + 1)
                    await report_step(
                        run, collected, [*train_metrics(result), *synced, *joined(collectors)], clock
                    )
                    await policy.checkpoint_if_due()
                    await policy.export_if_due()
                    await drop_old_routing(run, step + 1)
                pauses.before(step + 1)
            with span("evaluate"):
                await beside.evaluated(config.steps)
            with span("checkpoint"):
                await policy.checkpointed()
            await policy.tell_spans()
            await report_run(run)
    return run.folder.location
