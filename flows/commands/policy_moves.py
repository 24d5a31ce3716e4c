"""The commands `gate`, `promote`, `rollback` and `improve`: a policy is compared, approved in the terminal, and the alias is moved."""

import getpass
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import typer

from rollmill.flows.checks.preflight import preflight_in_turn
from rollmill.flows.commands.flow_process import run_flow
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.policies.policy_gate import PolicyGate
from rollmill.flows.policies.promotion import find_passed_gate, promote_policy, roll_back, send_webhook
from rollmill.tasks.errors import ConfigError, GateError
from rollmill.tasks.look.comparisons.gate_table import make_gate_view
from rollmill.tasks.look.terminal.output import print_view
from rollmill.tasks.rollout.chat_logs.log_files import list_log_files
from rollmill.tasks.store.promotion.gate_record import GateRecord, read_gate
from rollmill.tasks.store.promotion.policy_alias import AliasRecord, PolicyAlias


def gate_here(compared: PolicyGate, *, prints_json: bool = False) -> GateRecord:
    """Compare two policies and return the decision; the flow gate runs in this process if an evaluation is missing."""
    if compared.find_missing() is None:
        return compared.decide()

    def call() -> Coroutine[Any, Any, GateRecord]:
        from rollmill.flows.promote import gate

        return gate(
            compared.candidate,
            compared.alias,
            compared.against,
            compared.margin,
            compared.error_rate,
            compared.min_reward,
        )

    try:
        return run_flow(call, prints_json=prints_json)
    except GateError:
        first, second = compared.lineages
        record = read_gate(PolicyAlias(compared.alias).root, first.digest, second.digest if second else "")
        if record is None:
            raise
        return record


def promote_here(
    candidate: str, to: str, *, is_approved: bool, approved_by: str, note: str, webhook: str
) -> None:
    """Promote a policy, once a person has answered yes in the terminal, unless `is_approved`.

    Raises:
        GateError: it is blocked, or was not compared with the policy that is in production.
        ConfigError: there is no terminal to ask in.
    """
    alias = PolicyAlias(to)
    record = find_passed_gate(candidate, alias)
    if not is_approved:
        print_view(make_gate_view(record))
        if not sys.stdin.isatty():
            raise ConfigError("--yes", False, "there is no terminal to ask in; give --yes to approve it")
        typer.confirm(f"Promote it to {to}?", abort=True)
    moved = promote_policy(candidate, alias, approved_by or _name_user(), note)
    _report(alias, moved, webhook)


def roll_back_here(location: str, approved_by: str, note: str, webhook: str) -> None:
    """Move an alias back to the policy before; ConfigError if there is none."""
    alias = PolicyAlias(location)
    _report(alias, roll_back(alias, approved_by or _name_user(), note), webhook)


def _name_user() -> str:
    """Return the name of the user; "user ID" where the machine has no name for it, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _report(alias: PolicyAlias, moved: AliasRecord, webhook: str) -> None:
    typer.echo(f"{alias.location} is version {moved.version} of run {moved.run}: {moved.policy}")
    if webhook and (failure := send_webhook(webhook, alias, moved)):
        typer.echo(f"rollmill: warning: {failure}", err=True)


def improve_here(
    name: str,
    config: RunConfig,
    files: Sequence[str],
    compared: PolicyGate,
    *,
    is_approved: bool,
    webhook: str,
) -> None:
    """Run one cycle of the flow improve in this process; `compared` has the alias and the thresholds of the gate."""
    list_log_files(files)

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.improve import improve

        return improve(
            name,
            config,
            list(files),
            compared.alias,
            "automatic" if is_approved else "person",
            compared.margin,
            compared.error_rate,
            compared.min_reward,
            webhook,
        )

    preflight_in_turn(config)
    run_flow(call)
