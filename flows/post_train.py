"""The main flow: for each step collect -> train -> sync -> report."""

from prefect import flow

from flows.collect import collect_step
from flows.config import RunConfig, check
from flows.evaluate import evaluate_version
from flows.failure import one_error
from flows.folder import check_resumable, run_folder
from flows.policy import open_policy
from flows.report import report_run, report_step, train_metrics
from flows.run import open_run
from flows.start_model import ensure_start_model
from tasks.observe.spans import StepClock


@flow(name="post-train", flow_run_name="{run_name}", persist_result=False)
async def post_train(run_name: str, config: RunConfig) -> str:
    """Post-train a policy: sample, score, train and sync, step by step, from where the run's folder stands.

    Args:
        run_name: folder of the run below `store.root`; one that exists and is unfinished is gone on with.
        config: all settings.

    Returns:
        The run's folder.
    """
    check(config)
    check_resumable(run_folder(run_name, config), config)
    with one_error():
        model = await ensure_start_model(config)
        async with open_run(run_name, config, model) as run, open_policy(run) as policy:
            for step in range(await policy.restore(), config.steps):
                clock = StepClock()
                with clock.span("evaluate"):
                    await evaluate_version(run, step)
                with clock.span("collect"):
                    digest = await collect_step(run, step)
                with clock.span("train"):
                    result = await policy.train(step, digest)
                with clock.span("sync"):
                    synced = await policy.sync(result)
                await report_step(run, step, [*train_metrics(result), *synced], clock)
                await policy.checkpoint_if_due()
            await evaluate_version(run, config.steps)
            await report_run(run)
    return str(run.folder.root)
