"""The flow import: conversations that another system logged become the rollouts of a run, and are scored."""

import asyncio

from prefect import flow

from rollmill.flows.collect import collect_steps
from rollmill.flows.configuration.forms import CollectSettings
from rollmill.flows.failure import one_error
from rollmill.flows.offline.log_import import LogImport
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.private_prefect import end_in_order
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.folder import RunName, is_finished, run_folder
from rollmill.flows.run.live_run import open_run
from rollmill.flows.start_model import check_start, ensure_start_model
from rollmill.flows.step.overlap import StepPipeline
from rollmill.tasks.observe.step_clock import record_flow
from rollmill.tasks.rollout.chat_logs.log_files import read_logs
from rollmill.tasks.score.terms import check_scorer


@flow(name="import", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
@record_flow
async def import_logs(
    run_name: RunName, config: CollectSettings, files: list[str], redo_failed: bool = False
) -> str:
    """Store the conversations of log files as rollouts of a run, and score them; `retrain` trains on them.

    What the run has already is not stored again. So the same call resumes a killed import, and adds what is new in the files.

    Args:
        run_name: folder of the run below `store.root`; created if missing.
        config: all settings; those of sampling, serving and training have no effect.
        files: JSON Lines or Parquet, or folders of such files.
        redo_failed: True to score again what the scorer failed on, in unfinished steps.

    Returns:
        The run's folder.
    """
    own = {"evaluate": {"every": 0}, "rollout": {"max_refill_groups": 0}}
    config = config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values) for section, values in own.items()
        }
    )
    folder = run_folder(run_name, config)
    with end_in_order(), one_error():
        # First, since a wrong scorer or a broken file must not cost the training of a start model, nor begin a run.
        check_scorer(config.score)
        logs = await asyncio.to_thread(read_logs, files)
        model = await ensure_start_model(config)
        found = await asyncio.to_thread(LogImport.plan, folder, config, model, logs.conversations)
        found.left_out.update(logs.left_out)
        say(found.describe())
        if not found.groups and (not found.n_steps or is_finished(folder)):
            return folder.location
        config = config.model_copy(update={"steps": found.n_steps})
        await check_start(run_name, config, samples=False, trains=False)
        async with (
            open_run(run_name, config, model, redo_failed=redo_failed, trains=False) as run,
            StepPipeline(run) as pipeline,
        ):
            await found.store(run)
            await collect_steps(run, pipeline)
    return folder.location
