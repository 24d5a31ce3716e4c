"""The flow collect: rollouts and scores by the start model, and no training."""

import asyncio

from prefect import State, flow
from prefect.runtime import flow_run

from flows.beside import Beside
from flows.checks.machine import check_machine
from flows.config import RunConfig
from flows.failure import one_error
from flows.groups.collector import NO_RUN, JoinConfig, collect_for
from flows.groups.collector_runs import joined, open_collectors
from flows.policies.held_policy import open_held_policy
from flows.reporting.report import report_run, report_step
from flows.rules import check
from flows.running.folder import RunName, check_resumable, run_folder
from flows.running.run import open_run
from flows.start_model import ensure_start_model
from flows.ui.cancelling import mark_cancelled
from flows.ui.terminating import ended_in_order
from tasks.observe.run_line import recorded
from tasks.observe.spans import span
from tasks.observe.step_clock import StepClock
from tasks.score.check import check_scorer
from tasks.serve.version import PolicyVersion
from tasks.store.kind import done_steps


def _flow_run_name() -> str:
    values = flow_run.parameters
    join = JoinConfig.model_validate(values.get("join") or {})
    return f"{values['run_name']} / collector {join.number}" if join.url else str(values["run_name"])


@flow(name="collect", flow_run_name=_flow_run_name, persist_result=False, on_cancellation=[mark_cancelled])
@recorded
async def collect(
    run_name: RunName, config: RunConfig, redo_failed: bool = False, join: JoinConfig = NO_RUN
) -> str | State[str]:
    """Sample and score steps by the start model, which nothing trains; `rescore` and `retrain` go on from there.

    Args:
        run_name: folder of the run below `store.root`; one that exists and is unfinished is gone on with.
        config: all settings; those of training are not gone by, and nothing is evaluated.
        redo_failed: sample what failed of the steps that are not done again, as a further attempt.
        join: of a collector; filled in by the run that shares its groups (rollout.collectors).

    Returns:
        The run's folder.
    """
    if join.url:
        with ended_in_order():
            return await collect_for(config, join)
    config = without_evaluation(config)
    with span("checking"):
        check(config)
        check_scorer(config.score)
        await check_machine(config, trains=False)
        folder = run_folder(run_name, config)
        await asyncio.to_thread(check_resumable, folder, config, trains=False)
    with ended_in_order(), one_error():
        model = await ensure_start_model(config)
        async with (
            open_run(run_name, config, model, redo_failed=redo_failed, trains=False) as run,
            open_collectors(run) as collectors,
            open_held_policy(run, PolicyVersion(run.id, 0, 0)),
            Beside(run, collectors) as beside,
        ):
            first = len(await asyncio.to_thread(done_steps, run.folder, run.store.manifest))
            run.progress.begin(first)
            run.compactor.begin(first)
            for step in range(first, config.steps):
                with StepClock(step) as clock:
                    beside.begin(step)
                    with clock.span("collect"):
                        collected = await beside.collected(step)
                    await report_step(run, collected, joined(collectors), clock)
                    run.compactor.begin(step + 1)
            await report_run(run)
    return run.folder.location


def without_evaluation(config: RunConfig) -> RunConfig:
    """Settings of a run that evaluates nothing."""
    evaluate = config.evaluate.model_copy(update={"enabled": False})
    return config.model_copy(update={"evaluate": evaluate})
