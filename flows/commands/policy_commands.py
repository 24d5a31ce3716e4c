"""The panel "Policies" of `rollmill --help`: what made an exported policy, and which one is in production."""

from typing import Annotated

import typer

from rollmill.flows.commands.options import AsJson, Overrides, Preset

DEFAULT_ALIAS = "policies/production"
PANEL = "Policies"
commands = typer.Typer()

PolicyFolder = Annotated[
    str,
    typer.Argument(metavar="FOLDER", help="Folder of an exported policy, s3://bucket/prefix, or an alias."),
]
Candidate = Annotated[
    str, typer.Argument(metavar="CANDIDATE", help="Folder of an exported policy, or an alias.")
]
To = Annotated[str, typer.Option("--to", metavar="ALIAS", help="Alias of the policy in production.")]
Alias = Annotated[
    str, typer.Argument(metavar="ALIAS", help="Alias, such as s3://bucket/policies/production.")
]
By = Annotated[str, typer.Option(help="Who approves it, for the history; default: your user name.")]
Note = Annotated[str, typer.Option(help="Why, for the history.")]
Webhook = Annotated[
    str, typer.Option(metavar="URL", help="Address that gets the move as JSON by POST afterwards.")
]
Margin = Annotated[float, typer.Option(min=1e-6, help="Largest loss of mean reward that does not matter.")]
ErrorRate = Annotated[
    float,
    typer.Option(
        min=1e-6, max=0.5, help="Largest probability with which a policy that is worse by the margin passes."
    ),
]
MinReward = Annotated[
    float | None, typer.Option(help="Smallest mean reward of the sampled answers that passes.")
]


@commands.command(rich_help_panel=PANEL)
def lineage(
    policy: PolicyFolder,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of rows of the table; 0: all.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List every trajectory that made an exported policy, and check each byte of them; exit status 1: something is wrong."""
    from rollmill.tasks.look.tables.lineage_table import make_lineage_view
    from rollmill.tasks.look.terminal.output import print_findings, print_view
    from rollmill.tasks.store.lineage.lineage_trace import trace_policy
    from rollmill.tasks.store.promotion.policy_alias import resolve_policy

    report = trace_policy(resolve_policy(policy))
    print_view(make_lineage_view(policy, report, limit), as_json=as_json)
    if not as_json:
        print_findings(policy, report.findings)
    if report.findings:
        raise typer.Exit(1)


@commands.command(rich_help_panel=PANEL)
def gate(
    candidate: Candidate,
    to: To = DEFAULT_ALIAS,
    against: Annotated[
        str,
        typer.Option(metavar="FOLDER|ALIAS", help="Policy to compare with; default: the one in production."),
    ] = "",
    margin: Margin = 0.05,
    error_rate: ErrorRate = 0.05,
    min_reward: MinReward = None,
    as_json: AsJson = False,
) -> None:
    """Compare a policy with the one in production on the same held-out prompts; exit status 1: it is blocked.

    Stored evaluations are used; a policy that has none like the other's is evaluated first.
    """
    from rollmill.flows.commands.policy_moves import gate_here
    from rollmill.flows.policies.policy_gate import PolicyGate
    from rollmill.tasks.look.comparisons.gate_table import make_gate_view
    from rollmill.tasks.look.terminal.output import print_view

    compared = PolicyGate(candidate, to, against, margin, error_rate, min_reward)
    # The flow gate, which runs if an evaluation is missing, prints the decision.
    is_printed = compared.find_missing() is not None
    record = gate_here(compared, prints_json=as_json)
    if as_json or not is_printed:
        print_view(make_gate_view(record), as_json=as_json)
    if not record.passed:
        raise typer.Exit(1)


@commands.command(rich_help_panel=PANEL)
def promote(
    candidate: Candidate,
    to: To = DEFAULT_ALIAS,
    yes: Annotated[bool, typer.Option("--yes", help="Approve it without a question.")] = False,
    by: By = "",
    note: Note = "",
    webhook: Webhook = "",
) -> None:
    """Move the alias of production to a policy that has passed `rollmill gate`, once a person approves it."""
    from rollmill.flows.commands.policy_moves import promote_here

    promote_here(candidate, to, is_approved=yes, approved_by=by, note=note, webhook=webhook)


@commands.command(rich_help_panel=PANEL)
def improve(
    preset: Preset,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Logs, or folders of logs, as for `rollmill import`."),
    ],
    name: Annotated[
        str,
        typer.Option(help="The logs are imported to the run NAME-logs; each cycle trains a run NAME-K."),
    ] = "improve",
    to: To = DEFAULT_ALIAS,
    margin: Margin = 0.05,
    error_rate: ErrorRate = 0.05,
    min_reward: MinReward = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Promote what passes, without a person's approval.")
    ] = False,
    webhook: Webhook = "",
    overrides: Overrides = None,
) -> None:
    """Import new logs, train on them from the policy in production, and promote the result if it passes its gate.

    The same command resumes a killed one, and adds what is new in the logs: it can run on a schedule.
    """
    from rollmill.flows.commands.policy_moves import improve_here
    from rollmill.flows.configuration.settings import load
    from rollmill.flows.policies.policy_gate import PolicyGate

    config = load(preset, tuple(overrides or ()))
    compared = PolicyGate("", to, "", margin, error_rate, min_reward)
    improve_here(name, config, files, compared, is_approved=yes, webhook=webhook)


@commands.command(rich_help_panel=PANEL)
def rollback(alias: Alias = DEFAULT_ALIAS, by: By = "", note: Note = "", webhook: Webhook = "") -> None:
    """Move the alias of production back to the policy before; repeated, it goes back further."""
    from rollmill.flows.commands.policy_moves import roll_back_here

    roll_back_here(alias, by, note, webhook)


@commands.command(rich_help_panel=PANEL)
def history(alias: Alias = DEFAULT_ALIAS, as_json: AsJson = False) -> None:
    """List which policies were in production, when, and who approved them; newest first."""
    from rollmill.tasks.look.comparisons.gate_table import make_history_view
    from rollmill.tasks.look.terminal.output import print_view
    from rollmill.tasks.store.promotion.policy_alias import PolicyAlias

    place = PolicyAlias(alias)
    view = make_history_view(place.location, (record for _, record in place.history()))
    print_view(view, as_json=as_json)
