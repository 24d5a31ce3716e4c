"""The flow collect: rollouts and scores by the start model, and no training."""

import asyncio

from prefect import flow

from rollmill.flows.configuration.forms import CollectSettings
from rollmill.flows.failure import one_error
from rollmill.flows.policies.fixed_policy import open_fixed_policy
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.private_prefect import end_in_order
from rollmill.flows.run.folder import RunName
from rollmill.flows.run.live_run import Run, open_run
from rollmill.flows.start_model import check_start, ensure_start_model
from rollmill.flows.step.overlap import StepPipeline
from rollmill.flows.step.report import report_run, report_step
from rollmill.tasks.observe.step_clock import StepClock, record_flow
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.store.run.resume import list_done_steps


@flow(name="collect", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
@record_flow
async def collect(run_name: RunName, config: CollectSettings, redo_failed: bool = False) -> str:
    """Sample and score steps with the start model, without training; `rescore` and `retrain` continue from the rows.

    Args:
        run_name: folder of the run below `store.root`; an unfinished run is resumed.
        config: all settings; those of training have no effect, and nothing is evaluated.
        redo_failed: True to sample failed trajectories of unfinished steps again, as a further attempt, and to score again what the scorer failed on.

    Returns:
        The run's folder.
    """
    unevaluated = config.evaluate.model_copy(update={"every": 0})
    config = config.model_copy(update={"evaluate": unevaluated})
    with end_in_order(), one_error():
        await check_start(run_name, config, trains=False)
        model = await ensure_start_model(config)
        async with (
            open_run(run_name, config, model, redo_failed=redo_failed, trains=False) as run,
            open_fixed_policy(run, PolicyVersion(run.id, 0, 0), run.folder.logs),
            StepPipeline(run) as pipeline,
        ):
            await collect_steps(run, pipeline)
    return run.folder.location


async def collect_steps(run: Run, pipeline: StepPipeline) -> None:
    """Collect and report the steps of a run that are not done yet, and then the run."""
    first = len(await asyncio.to_thread(list_done_steps, run.folder, run.store.manifest))
    run.progress.begin(first)
    # Nothing is trained here, so a step is final as soon as it is collected.
    run.compactor.begin(first)
    for step in range(first, run.config.steps):
        with StepClock(step) as clock:
            pipeline.begin(step)
            with clock.span("collect"):
                collected = await pipeline.collect(step)
            await report_step(run, collected, (), clock)
            run.compactor.begin(step + 1)
    await report_run(run)
