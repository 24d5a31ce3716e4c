"""The flow improve: new logs -> rollouts and scores -> training -> evaluation -> gate -> production; one cycle a call."""

import asyncio
from functools import partial
from typing import Literal

from prefect import flow

from rollmill.flows.checks.preflight import check_machine, preflight_in_turn
from rollmill.flows.configuration.forms import RetrainSettings
from rollmill.flows.failure import one_error
from rollmill.flows.import_logs import import_logs
from rollmill.flows.policies.improvement import Cycle, Improvement
from rollmill.flows.policies.policy_gate import DEFAULT_ALIAS
from rollmill.flows.prefect_integration.artifacts import show_page
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.prefect_integration.run_pages import table_page
from rollmill.flows.promote import Margin, Share, ask_and_promote, gate, move_alias
from rollmill.flows.retrain import retrain
from rollmill.flows.run.folder import RunName, is_finished, run_folder
from rollmill.tasks.errors import ConfigError, GateError
from rollmill.tasks.look.comparisons.log_drift import make_drift_view
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.promotion.policy_alias import PolicyAlias

Approval = Literal["person", "automatic"]


@flow(name="improve", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
async def improve(
    run_name: RunName,
    config: RetrainSettings,
    files: list[str],
    alias: str = DEFAULT_ALIAS,
    approval: Approval = "person",
    margin: Margin = 0.05,
    error_rate: Share = 0.05,
    min_reward: float | None = None,
    webhook: str = "",
) -> str:
    """Import what is new in log files, train on it from the policy in production, and promote the result if it passes its gate.

    Each part stores what it did, and the same call resumes where a killed one ended. So this can run on a schedule.

    Args:
        run_name: the conversations are imported to the run NAME-logs, and each cycle trains a run NAME-K.
        config: all settings; `steps` is that of a cycle's training.
        files: logs, or folders of logs.
        alias: alias of the policy in production.
        approval: `person`: pause until somebody approves the promotion in Prefect's UI; `automatic`: promote what passes.
        margin: see the flow gate.
        error_rate: see the flow gate.
        min_reward: see the flow gate.
        webhook: address that gets the move as JSON by POST; empty: none.

    Returns:
        What was done.
    """
    improvement = Improvement(run_name, config, PolicyAlias(alias), (margin, error_rate, min_reward))
    with one_error():
        if not RunFolder(config.store.root).is_local:
            raise ConfigError(
                "store.root", config.store.root, "the gate's servers read policies from a disk: give a folder"
            )
        improvement.alias.check_kind(RunFolder(config.store.root))
        await check_machine(partial(preflight_in_turn, config))
        # An open cycle ends before further logs are imported, or it would train on other rows than it began with.
        cycle = await asyncio.to_thread(improvement.find_open)
        if cycle is None:
            # A scorer that failed may have been repaired: the same command resumes the cycle.
            await import_logs(improvement.logs_name, config, files, redo_failed=True)
            cycle = await asyncio.to_thread(improvement.find_newest)
        if cycle is None or await asyncio.to_thread(improvement.is_decided, cycle):
            said = "nothing new" + (f": the policy of cycle {cycle.number} was decided on" if cycle else "")
            say(said)
            return said
        await train_cycle(improvement, cycle)
        await report_drift(improvement)
        policy = improvement.policy(cycle)
        try:
            record = await gate(policy, alias, "", margin, error_rate, min_reward)
        except GateError as error:
            # A worse policy is no failure of the flow: it is what the gate is for.
            return str(error)
        if approval == "person":
            return await ask_and_promote(record, alias, webhook)
        return await move_alias(record, alias, "the flow improve", f"cycle {cycle.number}", webhook)


async def train_cycle(improvement: Improvement, cycle: Cycle) -> None:
    """Train the run of a cycle, unless it is trained."""
    config = await asyncio.to_thread(improvement.training_config, cycle)
    if await asyncio.to_thread(is_finished, run_folder(cycle.run_name, config)):
        return
    say(f"cycle {cycle.number} trains {cycle.run_name} on the imported steps from {cycle.first_step} on")
    await retrain(cycle.run_name, config)


async def report_drift(improvement: Improvement) -> None:
    """Print how the conversations of the cycles differ, and show it in Prefect's UI."""
    ends = await asyncio.to_thread(improvement.list_numbers)
    view = await asyncio.to_thread(make_drift_view, improvement.logs, ends)
    for line in view.notes:
        say(line)
    await show_page(f"{improvement.name}-drift", partial(table_page, view))
