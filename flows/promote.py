"""The flows gate and promote: compare a candidate with the policy in production, ask a person, move the alias."""

import asyncio
from typing import Annotated

from prefect import flow
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput
from pydantic import Field

from rollmill.flows.evaluate import evaluate
from rollmill.flows.failure import one_error
from rollmill.flows.policies.policy_gate import DEFAULT_ALIAS, PolicyGate
from rollmill.flows.policies.promotion import check_passed, promote_policy, send_webhook
from rollmill.flows.prefect_integration.flow_run import current_flow_run
from rollmill.flows.prefect_integration.links import flow_run_page
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.look.comparisons.gate_table import describe_gate
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.promotion.gate_record import GateRecord, write_gate
from rollmill.tasks.store.promotion.policy_alias import PolicyAlias

Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Margin = Annotated[float, Field(gt=0.0)]
# A person may answer after a weekend.
APPROVAL_TIMEOUT_S = 7 * 86_400


class Approval(RunInput):
    """What a person is asked before a policy is promoted."""

    approve: bool = Field(False, description="Promote the policy.")
    approved_by: str = Field("", description="Your name, for the history.")
    note: str = Field("", description="Why, for the history.")


@flow(name="gate", flow_run_name="{candidate}", persist_result=False)
async def gate(
    candidate: str,
    alias: str = DEFAULT_ALIAS,
    against: str = "",
    margin: Margin = 0.05,
    error_rate: Share = 0.05,
    min_reward: float | None = None,
) -> GateRecord:
    """Compare a candidate with the policy in production, and store the decision; evaluates what has no evaluation yet.

    Args:
        candidate: folder of an exported policy.
        alias: alias that it is to have.
        against: policy to compare with; empty: the one that the alias leads to.
        margin: largest loss of reward that does not matter.
        error_rate: probability, at most, that a policy passes that is worse by the margin or more.
        min_reward: smallest mean reward of sampled answers that passes; none: any.

    Returns:
        The decision.

    Raises:
        GateError: the candidate is blocked.
    """
    with one_error():
        compared = PolicyGate(candidate, alias, against, margin, error_rate, min_reward)
        made = ""
        while missing := await asyncio.to_thread(compared.find_missing):
            if missing.run_name == made:
                raise compared.explain_unlike(missing)
            await evaluate(made := missing.run_name, missing.config, 0)
        record = await asyncio.to_thread(compared.decide)
        for line in describe_gate(record):
            say(line)
        check_passed(record)
    return record


@flow(name="promote", flow_run_name="{candidate}", persist_result=False)
async def promote(
    candidate: str,
    alias: str = DEFAULT_ALIAS,
    margin: Margin = 0.05,
    error_rate: Share = 0.05,
    min_reward: float | None = None,
    webhook: str = "",
) -> str:
    """Gate a candidate, pause until a person approves it, then move the alias to it and send a webhook.

    Args:
        candidate: folder of an exported policy.
        alias: alias to move.
        margin: see the flow gate.
        error_rate: see the flow gate.
        min_reward: see the flow gate.
        webhook: address that gets the move as JSON by POST; empty: none.

    Returns:
        What was done.

    Raises:
        GateError: the candidate is blocked, or the alias was moved while a person was asked.
    """
    with one_error():
        # Nobody is asked for a move that is impossible.
        PolicyAlias(alias).check_kind(RunFolder(candidate))
        record = await gate(candidate, alias, "", margin, error_rate, min_reward)
        return await ask_and_promote(record, alias, webhook)


async def ask_and_promote(record: GateRecord, alias: str, webhook: str) -> str:
    """Pause the flow until a person answers, then move the alias to the candidate that has passed its gate; returns what was done.

    A refusal is stored as the gate's decision, so nobody is asked again about the same two policies.

    Raises:
        GateError: the alias was moved while the person was asked.
    """
    form = Approval.with_initial_data(description="\n\n".join(describe_gate(record)))
    say(f"paused until somebody approves it (Resume) at {flow_run_page(current_flow_run().id)}")
    answer = await apause_flow_run(wait_for_input=form, timeout=APPROVAL_TIMEOUT_S, key="approval")
    if answer.approve:
        return await move_alias(record, alias, answer.approved_by, answer.note, webhook)
    reason = f"{answer.approved_by or 'a person'} did not approve it{answer.note and f': {answer.note}'}"
    refused = record.model_copy(update={"reasons": (*record.reasons, reason)})
    await asyncio.to_thread(write_gate, PolicyAlias(alias).root, refused)
    said = f"{record.candidate.location}: {reason}; {alias} is as before"
    say(said)
    return said


async def move_alias(record: GateRecord, alias: str, approved_by: str, note: str, webhook: str) -> str:
    """Move an alias to a candidate that has passed its gate, and send the webhook; returns what was done."""
    place = PolicyAlias(alias)
    moved = await asyncio.to_thread(promote_policy, record.candidate.location, place, approved_by, note)
    said = f"{alias} is version {moved.version} of run {moved.run}, {moved.policy}"
    say(said)
    if webhook and (failure := await asyncio.to_thread(send_webhook, webhook, place, moved)):
        say(failure)
    return said
