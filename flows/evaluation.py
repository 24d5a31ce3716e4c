"""The flow evaluate: a stored version of a run's policy, or a model, against held-out prompts; without a trainer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefect import flow

from flows.checks.evaluable import chosen_version
from flows.checks.machine import check_machine
from flows.config import RunConfig
from flows.evaluate import finish_evaluation, is_evaluated
from flows.failure import one_error
from flows.looking.inspection import held_out
from flows.policies.held_policy import open_held_policy
from flows.policies.stored_policy import model_of, serving
from flows.rules import check
from flows.running.folder import RunName, run_folder
from flows.running.run import Run, open_run
from flows.start_model import ensure_start_model
from flows.ui.cancelling import mark_cancelled
from flows.ui.progress import say
from flows.ui.terminating import ended_in_order
from tasks.serve.version import PolicyVersion


@flow(name="evaluate", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
async def evaluate(run_name: RunName, config: RunConfig) -> str:
    """Evaluate a version of a run's policy on held-out prompts; the rows go to the run, which stays what it is.

    Args:
        run_name: folder of the run below `store.root`; one that is not there is begun, and its start model evaluated.
        config: all settings; `evaluate.version` says which version.

    Returns:
        How it went, in words.
    """
    check(config)
    folder = run_folder(run_name, config)
    version = await asyncio.to_thread(chosen_version, folder, config.evaluate.version)
    await check_machine(config, trains=False)
    with ended_in_order(), one_error():
        model = await ensure_start_model(config)
        async with open_run(run_name, config, model, adds=True) as run:
            if not await asyncio.to_thread(is_evaluated, run, version):
                async with _served(run, version):
                    await finish_evaluation(run, version)
                await run.store.writer.note()
                await run.recording.wait_until_recorded()
            result = await asyncio.to_thread(_told, run, version)
    say(result)
    return result


@asynccontextmanager
async def _served(run: Run, version: int) -> AsyncIterator[None]:
    """Servers to ask for a version: those of serve.urls, which hold it, or ones that are started with it."""
    if run.config.serve.urls:
        async with open_held_policy(run, PolicyVersion(run.id, run.store.manifest.incarnation, version)):
            yield
    else:
        async with model_of(run, version) as policy, serving(run, policy, version):
            yield


def _told(run: Run, version: int) -> str:
    """Reward and accuracy of an evaluation, in a line."""
    (row,) = held_out(run.folder, version=version).to_dicts()
    return (
        f"version {version} of {run.folder.location}: held-out reward {row['reward']:.3f} (sampled), "
        f"accuracy {row['greedy_accuracy']:.3f} (greedy), {run.config.evaluate.n_prompts} prompts"
    )
