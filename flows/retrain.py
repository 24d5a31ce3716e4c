"""Trains from stored rollouts and a chosen scores data set: for each step draw -> train -> report, offline."""

import asyncio
from collections.abc import Sequence

from prefect import flow

from flows.checks.machine import check_machine
from flows.checks.offline import check_offline, check_tokenizers
from flows.config import RunConfig
from flows.evaluate import evaluate_version, is_due
from flows.failure import one_error
from flows.groups.draws import Draw, GroupPool, store_draw
from flows.policies.policy import Policy, open_policy
from flows.reporting.report import report_run, store_metrics, train_metrics
from flows.rules import check
from flows.running.folder import RunName, check_resumable, existing_run, run_folder
from flows.running.run import Run, TrainingRun, open_offline_run, open_run
from flows.running.space import StepSpace
from flows.start_model import ensure_start_model
from flows.ui.cancelling import mark_cancelled
from flows.ui.progress import say
from flows.ui.recording import forget_results
from flows.ui.terminating import ended_in_order
from tasks.observe.metrics import Metric
from tasks.observe.run_line import recorded
from tasks.observe.spans import span, spanned
from tasks.observe.step_clock import StepClock
from tasks.store.draw import steps_of_a_pass
from tasks.store.manifest import Source
from tasks.store.sources import check_sources, sources_of


@flow(name="retrain", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
@recorded
async def retrain(run_name: RunName, config: RunConfig) -> str:
    """Train a new run on what others sampled; vLLM servers are there for evaluations alone, and without these not at all.

    Args:
        run_name: folder of the new run below `store.root`; one that exists and is unfinished is gone on with.
        config: all settings; `retrain` says from what.

    Returns:
        The new run's folder.
    """
    with span("checking"):
        check(config)
        check_offline(config)
        await check_machine(config, samples=config.evaluate.enabled)
        await asyncio.to_thread(check_resumable, run_folder(run_name, config), config)
        sources = await asyncio.to_thread(checked_sources, run_name, config)
    with ended_in_order(), one_error():
        with span("planning"):
            pool = await asyncio.to_thread(GroupPool.read, config)
        model = await ensure_start_model(config)
        check_tokenizers(config)
        tell(pool, config)
        opened = (open_run if config.evaluate.enabled else open_offline_run)(run_name, config, model)
        async with opened as run, open_policy(run) as policy:
            run.store.keep_sources(sources)
            first = await policy.restore()
            with span("evaluate"):
                await evaluate(run, first)
            space = StepSpace(run)
            for step in range(first, config.steps):
                with StepClock(step) as clock:
                    with clock.span("draw"):
                        await space.check(step)
                        draw = await store_draw(run, pool, step)
                    with clock.span("train"):
                        result = await policy.train(step, draw.digest)
                    with clock.span("evaluate"):
                        synced = await show(run, policy, step + 1)
                    await report_draw(run, draw, [*train_metrics(result), *synced], clock)
                    await policy.checkpoint_if_due()
                    await policy.export_if_due()
            with span("checkpoint"):
                await policy.checkpointed()
            await policy.tell_spans()
            await report_run(run)
    return run.folder.location


def checked_sources(run_name: str, config: RunConfig) -> tuple[Source, ...]:
    """The runs to train from; ConfigError when another lies in the place of one that this run was trained from."""
    check_sources(run_folder(run_name, config))
    return sources_of(map(existing_run, config.retrain.sources))


async def show(run: TrainingRun, policy: Policy, version: int) -> list[Metric]:
    """Give the servers a version that is to be evaluated, and evaluate it; other versions they never have."""
    if not is_due(run, version):
        return []
    synced = await policy.sync(only_name=False)
    await evaluate(run, version)
    return synced


async def evaluate(run: TrainingRun, version: int) -> None:
    """Evaluate the version that the servers have, if there are servers and it is due."""
    if isinstance(run, Run):
        await evaluate_version(run, version)


def tell(pool: GroupPool, config: RunConfig) -> None:
    """Say what there is to draw from, and how often it is gone over."""
    left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(pool.left_out.items()))
    passes = config.steps / steps_of_a_pass(len(pool.groups), config.retrain.groups_per_step)
    say(
        f"{len(pool.groups)} groups to draw from{left_out and f' (left out: {left_out})'}; {config.steps} steps are "
        f"{passes:.2g} passes"
    )


@spanned("report")
async def report_draw(run: TrainingRun, draw: Draw, metrics: Sequence[Metric], clock: StepClock) -> None:
    """Store the step's metrics and show it."""
    measured = {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
    measured |= {"time/step_s": clock.elapsed_s, "retrain/reward": draw.reward}
    own = [Metric(name, "all", "value", value) for name, value in measured.items()]
    await run.store.spans.store(draw.step)
    vitals = [run.store.spans.lost(), *await run.vitals.of_step()]
    await store_metrics(run, draw.step, [*metrics, *own, *vitals])
    await run.store.writer.note()
    run.progress.step_done(
        draw.step,
        reward=draw.reward,
        tokens_per_s=draw.tokens / clock.elapsed_s,
        seconds=clock.elapsed_s,
        dropped="",
    )
    run.artifacts.step_done(draw.step, scorer="")
    forget_results()
