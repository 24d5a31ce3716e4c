"""The panel "Policies" of `rollmill --help`: what made an exported policy."""

from typing import Annotated

import typer

from rollmill.flows.commands.options import AsJson

PANEL = "Policies"
commands = typer.Typer()

PolicyFolder = Annotated[
    str,
    typer.Argument(metavar="FOLDER", help="Folder of an exported policy, or s3://bucket/prefix."),
]


@commands.command(rich_help_panel=PANEL)
def lineage(
    policy: PolicyFolder,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of rows of the table; 0: all.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List every trajectory that made an exported policy, and check each byte of them; exit status 1: something is wrong."""
    from rollmill.tasks.look.tables.lineage_table import make_lineage_view
    from rollmill.tasks.look.terminal.output import print_findings, print_json, print_view
    from rollmill.tasks.store.folders import RunFolder
    from rollmill.tasks.store.lineage.lineage_trace import trace_policy

    report = trace_policy(RunFolder(policy))
    view = make_lineage_view(policy, report, limit)
    if as_json:
        print_json(view.values)
    else:
        print_view(view)
        print_findings(policy, report.findings)
    if report.findings:
        raise typer.Exit(1)
