"""The main flow: for each step rollout -> score -> train_step -> sync_weights.

collect_step    samples and scores the step's groups (flows/step/step_collection.py), in the background while the step
before trains
train_step      applies the step's batch
sync_weights    brings the new weights to the vLLM servers; then the next step begins
"""

import asyncio
from pathlib import Path

from prefect import flow

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.forms import PostTrainSettings
from rollmill.flows.failure import one_error
from rollmill.flows.offline.retrain_sources import check_replay_sources, check_tokenizers
from rollmill.flows.policies.checkpointing import drop_old_routing
from rollmill.flows.policies.run_policy import open_policy, restore_policy
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.private_prefect import end_in_order, pause_between_steps
from rollmill.flows.run.folder import RunName, run_folder
from rollmill.flows.run.live_run import open_run
from rollmill.flows.start_model import check_start, ensure_start_model
from rollmill.flows.step.held_out import redo_failed_scores
from rollmill.flows.step.overlap import StepPipeline
from rollmill.flows.step.report import report_run, report_step, train_metrics
from rollmill.flows.step.step_groups import store_batch
from rollmill.tasks.observe.spans import span
from rollmill.tasks.observe.step_clock import StepClock, record_flow
from rollmill.tasks.store.run.manifest import TrainingSource
from rollmill.tasks.sync.task import sync_weights
from rollmill.tasks.train.task import train_step


@flow(name="post-train", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
@record_flow
async def post_train(run_name: RunName, config: PostTrainSettings, redo_failed: bool = False) -> str:
    """Post-train a policy: sample, score, train and sync, step by step; an unfinished run is resumed.

    Args:
        run_name: folder of the run below `store.root`.
        config: all settings.
        redo_failed: True to sample failed trajectories of steps without a batch again, as a further attempt, and to score again what the scorer failed on.

    Returns:
        The run's folder.
    """
    with end_in_order(), one_error(), pause_between_steps(config.steps) as pauses:
        model, sources = await _prepare_start(run_name, config)
        async with (
            open_run(run_name, config, model, redo_failed=redo_failed) as run,
            open_policy(run) as policy,
            StepPipeline(run) as pipeline,
        ):
            if sources:
                run.store.keep_sources(sources)
            if redo_failed:
                await redo_failed_scores(run)
            restored = await restore_policy(policy)
            # A process that was killed between a checkpoint and this removal left old rows.
            await drop_old_routing(run, restored.version)
            pipeline.begin(restored.version, after=[restored])
            for step in range(restored.version, config.steps):
                with StepClock(step) as clock:
                    with clock.span("collect"):
                        # rollout -> score, for each group of the step
                        collected = await pipeline.collect(step)
                    if config.serve.sleep:
                        with clock.span("evaluate"):
                            await pipeline.finish_evaluation(step)
                    with clock.span("train"):
                        batch = await store_batch(run, step, collected.outcomes)
                        trained = await train_step(policy, step, batch, wait_for=[collected])
                    with clock.span("evaluate"):
                        # The next sync replaces the weights that this evaluation samples from.
                        await pipeline.finish_evaluation(step)
                    with clock.span("sync"):
                        result = trained.result
                        synced = await sync_weights(
                            policy, result.version, only_name=not result.updated, wait_for=[trained]
                        )
                    # A step that has begun must finish, so none begins when a pause is due.
                    if not pauses.is_due(step + 1):
                        pipeline.begin(step + 1, after=[synced])
                    await report_step(run, collected, [*train_metrics(result), *synced.metrics], clock)
                    await policy.checkpoint_if_due()
                    await policy.export_if_due()
                    await drop_old_routing(run, step + 1)
                pauses.before(step + 1)
            with span("evaluate"):
                await pipeline.finish_evaluation(config.steps)
            with span("checkpoint"):
                await policy.finish_checkpoints()
            await policy.report_spans()
            await report_run(run)
    return run.folder.location


async def _prepare_start(run_name: str, config: RunConfig) -> tuple[Path, tuple[TrainingSource, ...]]:
    """Check what a run needs, and make its start model if that is missing; returns the model, and the runs that it replays."""
    await check_start(run_name, config)
    with span("planning"):
        sources = await asyncio.to_thread(check_replay_sources, run_folder(run_name, config), config)
    model = await ensure_start_model(config)
    # The start model may have been made just now.
    check_tokenizers(config, [each.folder for each in sources], "rollout.replay.sources")
    return model, sources
