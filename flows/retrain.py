"""The flow retrain: trains from stored rollouts and their scores; for each step draw -> train -> report."""

import asyncio
from collections.abc import Sequence

from prefect import flow

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.forms import RetrainSettings
from rollmill.flows.configuration.rules import describe_altered
from rollmill.flows.failure import one_error
from rollmill.flows.offline.draws import Draw, GroupPool, store_draw
from rollmill.flows.offline.retrain_sources import check_offline, check_source_sampling, check_tokenizers
from rollmill.flows.policies.run_policy import RunPolicy, open_policy, restore_policy
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.private_prefect import end_in_order, release_finished_tasks
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.folder import RunName, run_folder
from rollmill.flows.run.live_run import Run, TrainingRun, open_offline_run, open_run
from rollmill.flows.start_model import check_start, ensure_start_model
from rollmill.flows.step.held_out import evaluate_version, is_due
from rollmill.flows.step.report import report_run, store_step, train_metrics
from rollmill.flows.step.step_space import StepSpace
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.spans import record_span, span
from rollmill.tasks.observe.step_clock import StepClock, record_flow
from rollmill.tasks.score.group_outcomes import RolloutOrigin
from rollmill.tasks.store.group_draw import steps_per_pass
from rollmill.tasks.store.run.manifest import check_sources, read_sources
from rollmill.tasks.store.run.run_search import find_run
from rollmill.tasks.sync.task import SyncedVersion, sync_weights
from rollmill.tasks.train.task import TrainedStep, train_step


@flow(name="retrain", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
@record_flow
async def retrain(run_name: RunName, config: RetrainSettings) -> str:
    """Train a new run on the stored rollouts of others; vLLM servers start for evaluations only.

    Args:
        run_name: folder of the new run below `store.root`; an unfinished one is resumed.
        config: all settings; `retrain` names the sources.

    Returns:
        The new run's folder.
    """
    with end_in_order(), one_error():
        await check_start(run_name, config, samples=config.evaluate.every > 0)
        with span("planning"):
            await asyncio.to_thread(check_offline, config)
            # A source may have been replaced by another run since an earlier attempt at this run.
            await asyncio.to_thread(check_sources, run_folder(run_name, config))
            altered = await asyncio.to_thread(check_source_sampling, config, config.retrain.sources)
            sources = await asyncio.to_thread(lambda: read_sources(map(find_run, config.retrain.sources)))
            # Before any service starts: a run without a trainable group ends here.
            pool = await asyncio.to_thread(GroupPool.read, config)
        model = await ensure_start_model(config)
        # The start model may have been made just now.
        check_tokenizers(config, config.retrain.sources)
        report_pool(pool, config)
        if line := describe_altered(altered):
            say(line)
        # Without evaluation nothing is sampled, so no environment and no scorer are opened.
        opened = (open_run if config.evaluate.every else open_offline_run)(run_name, config, model)
        async with opened as run, open_policy(run) as policy:
            run.store.keep_sources(sources)
            restored = await restore_policy(policy)
            # The version that was restored may lack its evaluation.
            with span("evaluate"):
                await evaluate_if_served(run, restored)
            if restored.version == 0 and config.train.old_logprobs == "trainer":
                await score_imported(run, policy, pool)
            # Steps are drawn here without a StepPipeline, which checks the disk in other flows.
            space = StepSpace(run)
            for step in range(restored.version, config.steps):
                with StepClock(step) as clock:
                    with clock.span("draw"):
                        await space.check(step)
                        draw = await store_draw(run.store, config, pool, step)
                    with clock.span("train"):
                        trained = await train_step(policy, step, draw.digest)
                    with clock.span("evaluate"):
                        synced = await sync_and_evaluate(run, policy, trained)
                    metrics = [*train_metrics(trained.result), *synced]
                    await report_draw(run, draw, metrics, clock)
                    await policy.checkpoint_if_due()
                    await policy.export_if_due()
            with span("checkpoint"):
                await policy.finish_checkpoints()
            await policy.report_spans()
            await report_run(run)
    return run.folder.location


@record_span("recomputing")
async def score_imported(run: TrainingRun, policy: RunPolicy, pool: GroupPool) -> None:
    """Compute and store the start policy's log-probabilities of all imported trajectories that the run trains on.

    Nobody knows those of the policy that answered. Against the policy before each step, a ratio would let training move away from the
    answers without a bound; against the start policy, which is the one that answered or the nearest to it, it bounds the whole run.
    """
    imported = await asyncio.to_thread(pool.find_imported)
    if not imported:
        return
    say("computing the start policy's log-probabilities of imported trajectories, which training starts from")
    for step in range(run.config.steps):
        trained = await asyncio.to_thread(pool.list_trained, run.config, step)
        for source, source_step in sorted(trained.keys() & imported):
            await policy.score_ahead(step, trained[source, source_step], RolloutOrigin(source, source_step))


async def sync_and_evaluate(run: TrainingRun, policy: RunPolicy, trained: TrainedStep) -> Sequence[Metric]:
    """Send the trained weights to the vLLM servers and evaluate them, if an evaluation is due; return the sync's metrics."""
    version = trained.result.version
    if not is_due(run, version):
        return []
    synced = await sync_weights(policy, version, wait_for=[trained])
    await evaluate_if_served(run, synced)
    return synced.metrics


async def evaluate_if_served(run: TrainingRun, synced: SyncedVersion) -> None:
    """Evaluate the synced policy version on the held-out prompts, if the run has vLLM servers and an evaluation is due."""
    if isinstance(run, Run):
        await evaluate_version(run, synced.version, after=[synced])


def report_pool(pool: GroupPool, config: RunConfig) -> None:
    """Print how many groups can be drawn, how many are left out and why, and how many passes over them the run makes."""
    left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(pool.left_out.items()))
    passes = config.steps / steps_per_pass(len(pool.groups), config.rollout.groups_per_step)
    say(
        f"{len(pool.groups)} groups to draw from{left_out and f' (left out: {left_out})'}; {config.steps} steps are "
        f"{passes:.2g} passes"
    )


@record_span("report")
async def report_draw(run: TrainingRun, draw: Draw, metrics: Sequence[Metric], clock: StepClock) -> None:
    """Store the metrics of a retrained step, and show them on the terminal and in Prefect's UI."""
    reward = Metric("retrain/reward", "all", "value", draw.reward)
    seconds = await store_step(run, draw.step, [*metrics, reward], clock)
    run.progress.step_done(
        draw.step,
        reward=draw.reward,
        tokens_per_s=draw.tokens / seconds,
        seconds=seconds,
        dropped="",
    )
    run.artifacts.step_done(draw.step, scorer="")
    release_finished_tasks()
