"""The flow annotate: stores a teacher's log-probabilities of stored rollouts, in a separate partition of the data set logprobs."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import deployment

from rollmill.flows.checks.machine_needs import check_store
from rollmill.flows.checks.teacher_machine import check_teacher_machine
from rollmill.flows.configuration.forms import AnnotateSettings
from rollmill.flows.configuration.recipe import run_tokenizer
from rollmill.flows.failure import one_error
from rollmill.flows.offline.teacher import (
    UnannotatedStep,
    check_annotation,
    identify_teacher,
    list_unannotated,
    teacher_name,
)
from rollmill.flows.policies.teacher_servers import check_served_tokenizer, open_teacher_servers
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.private_prefect import end_in_order
from rollmill.flows.prefect_integration.progress import count_progress, quiet_task_runs, say
from rollmill.flows.run.folder import RunName, run_folder
from rollmill.flows.run.rollout_logprobs import READ, ReferenceDeployment
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read_trajectories
from rollmill.tasks.store.rows import rows_from_table
from rollmill.tasks.store.run.run_search import check_run
from rollmill.tasks.store.run.writable_run import OpenRun

# Trajectories whose log-probabilities are stored together: a kill loses those of the open bundles at most.
BUNDLE_ROWS = 32


@flow(name="annotate", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
async def annotate(run_name: RunName, config: AnnotateSettings) -> str:
    """Store a teacher's log-probabilities of the stored rollouts of a run, finished or not; those that are stored are kept.

    Args:
        run_name: folder of the run below `store.root`.
        config: all settings.

    Returns:
        The name under which they are stored.
    """
    folder = run_folder(run_name, config)
    await asyncio.to_thread(check_store, config.store.root)
    check_run(folder)
    await asyncio.to_thread(check_annotation, folder, config)
    name, model = teacher_name(config), await asyncio.to_thread(identify_teacher, folder, config)
    with end_in_order(), one_error():
        quiet_task_runs()
        store = await asyncio.to_thread(OpenRun.extend, folder, config_of=config.store)
        try:
            # Only the holder of the run's lock knows that no other process stores the same rows.
            steps = await asyncio.to_thread(list_unannotated, folder, config)
            async with store.writer:
                await _annotate_steps(store, config, [step for step in steps if step.ids], name, model)
        finally:
            await asyncio.to_thread(store.close)
    n_trajectories = sum(step.n_trajectories for step in steps)
    say(f"logprobs/policy={name} has all {n_trajectories} trajectories, by {model}")
    return name


async def _annotate_steps(
    store: OpenRun, config: AnnotateSettings, steps: Sequence[UnannotatedStep], name: str, model: str
) -> None:
    """Request and store what is missing, step by step; without a missing row no server is started."""
    if not steps:
        return
    if deployment.id:
        # A worker has started the flow; the command `rollmill` has checked this machine already.
        await asyncio.to_thread(check_teacher_machine, config)
    total = sum(len(step.ids) for step in steps)
    async with open_teacher_servers(config, store.folder.logs / "annotate") as servers:
        if config.serve.urls:
            await _check_tokenizers(store.folder, steps[0], servers)
        teacher = ReferenceDeployment(store, servers, config.max_in_flight, say, name, model)
        say(f"{total} trajectories have no log-probabilities by {name} yet")
        with count_progress(name, total) as advance:
            for step in steps:
                await annotate_step(store.folder, teacher, step, config.max_in_flight, advance)


@task(
    name="annotate step",
    task_run_name="step {step.step}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
async def annotate_step(
    folder: RunFolder,
    teacher: ReferenceDeployment,
    step: UnannotatedStep,
    max_in_flight: int,
    advance: Callable[[int], None],
) -> None:
    """Request the teacher's log-probabilities of a step's trajectories, and store them in bundles.

    Raises:
        RequestError: no server answered; names the trajectory.
        StoreError: rows could not be read or stored.
    """
    # One bundle more than is requested: what waits is read, and what waits longer is not.
    bundles = asyncio.Semaphore(1 + -(-max_in_flight // BUNDLE_ROWS))

    async def annotate_bundle(ids: Sequence[str]) -> None:
        try:
            rows = await asyncio.to_thread(read_trajectories, folder, step.step, ids, READ)
            await teacher.request(step.step, rows_from_table(rows))
            advance(len(ids))
        finally:
            bundles.release()

    async with asyncio.TaskGroup() as group:
        for first in range(0, len(step.ids), BUNDLE_ROWS):
            await bundles.acquire()
            group.create_task(annotate_bundle(step.ids[first : first + BUNDLE_ROWS]))


async def _check_tokenizers(folder: RunFolder, step: UnannotatedStep, servers: Sequence[VllmClient]) -> None:
    """Refuse running servers that read the tokens of a stored trajectory otherwise than the run; ConfigError has both texts."""
    tokenizer = await asyncio.to_thread(run_tokenizer, folder)
    rows = await asyncio.to_thread(read_trajectories, folder, step.step, step.ids[:1], ["token_ids"])
    token_ids = np.array(rows["token_ids"][0].as_py(), np.int32)
    for each in servers:
        await check_served_tokenizer(tokenizer, each, token_ids)
