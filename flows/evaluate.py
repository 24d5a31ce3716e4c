"""The flow evaluate: evaluates a stored policy version, or a model, on held-out prompts, without a trainer."""

import asyncio
from functools import partial
from typing import Annotated

from prefect import flow
from pydantic import Field

from rollmill.flows.checks.preflight import check_machine, preflight
from rollmill.flows.configuration.forms import EvaluateSettings
from rollmill.flows.configuration.rules import check_config
from rollmill.flows.failure import one_error
from rollmill.flows.policies.fixed_policy import open_fixed_policy
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.private_prefect import end_in_order
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.folder import LAST_VERSION, RunName, choose_version, run_folder
from rollmill.flows.run.live_run import Run, open_run
from rollmill.flows.start_model import ensure_start_model
from rollmill.flows.step.held_out import finish_evaluation, is_evaluated, redo_failed_scores
from rollmill.tasks.look.comparisons.paired_evaluations import is_complete
from rollmill.tasks.look.tables.run_tables import format_with_interval, list_held_out
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.serve.policy_version import PolicyVersion

# A policy version as a parameter of the flow; the run form of Prefect's UI refuses smaller numbers.
Version = Annotated[int, Field(ge=LAST_VERSION)]


@flow(name="evaluate", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
async def evaluate(
    run_name: RunName, config: EvaluateSettings, version: Version = LAST_VERSION, redo_failed: bool = False
) -> str:
    """Evaluate a version of a run's policy on held-out prompts; adds the rows to the run and changes nothing else of it.

    Args:
        run_name: folder of the run below `store.root`; a missing one is created, and its start model evaluated.
        config: all settings.
        version: policy version to evaluate, one with a checkpoint, or 0 for the start model; -1: the last.
        redo_failed: True to score stored held-out answers of all versions again whose scorer failed.

    Returns:
        Reward and accuracy, in words.
    """
    check_config(config, trains=False)
    folder = run_folder(run_name, config)
    version = await asyncio.to_thread(choose_version, folder, version)
    samples = not await asyncio.to_thread(is_complete, folder, version)
    await check_machine(partial(preflight, config, samples=samples, trains=False))
    with end_in_order(), one_error():
        model = await ensure_start_model(config)
        # An evaluation adds rows to the run without continuing it, so a finished run stays finished.
        async with open_run(run_name, config, model, adds=True) as run:
            if redo_failed:
                await redo_failed_scores(run)
            if not await asyncio.to_thread(is_evaluated, run, version):
                policy = PolicyVersion(run.id, run.store.manifest.incarnation, version)
                # A separate folder: servers of the run's own steps have theirs in logs/.
                async with open_fixed_policy(run, policy, run.folder.logs / "evaluate"):
                    await finish_evaluation(run, version)
            # Only shards that the inventory names are missed when they are lost.
            await run.store.writer.note()
            await run.recording.wait_until_recorded()
            result = await asyncio.to_thread(_summary, run, version)
    say(result)
    return result


def _summary(run: Run, version: int) -> str:
    """Return a line with the held-out reward and accuracy of an evaluated policy version, and one of each of several environments."""
    lines = []
    for env, rows in list_held_out(run.folder):
        row = next((each for each in rows if each["step"] == version), None)
        if row is None:
            # An environment of the run that this one was forked from.
            continue
        of_env = "" if env == ALL else f" of {env}"
        k = row["samples"]
        passed = f", pass@{k} {format_with_interval(row, 'pass_at_k')}" if k > 1 and row["pass_at_k"] else ""
        lines.append(
            f"version {version} of {run.folder.location}, {row['n']} held-out problems{of_env}, 95 % intervals: "
            f"reward {format_with_interval(row, 'reward')} sampled{passed}, "
            f"accuracy {format_with_interval(row, 'greedy_accuracy')} greedy"
        )
    return "\n".join(lines)
