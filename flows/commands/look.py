"""Commands that show what a run's data sets hold; they write nothing to the run."""

import json
from typing import Annotated

import typer

from flows.commands.options import AsJson, RunLocation

PANEL = "Look"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def inspect(
    run: RunLocation,
    step: Annotated[int | None, typer.Option(help="Show the groups of this step.")] = None,
    group: Annotated[int | None, typer.Option(help="Show the trajectories of this group.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run's data sets hold."""
    from rich.console import Console

    from flows.folder import existing_run
    from flows.inspection import view

    shown = view(existing_run(run), step=step, group=group)
    if as_json:
        typer.echo(json.dumps(shown.values, default=str))
    else:
        Console().print(shown.table())
