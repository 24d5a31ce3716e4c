"""Commands that generate and train."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Overrides, Preset

PANEL = "Run"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def run(
    preset: Preset,
    name: Annotated[
        str, typer.Option(help="Folder of the run below store.root; the preset's name by default.")
    ] = "",
    overrides: Overrides = None,
    again: Annotated[
        bool, typer.Option("--again", help="Move a finished run of that name aside, and start anew.")
    ] = False,
) -> None:
    """Run the flow post-train here; an unfinished run of that name is gone on with."""
    from flows.config import load

    config = load(preset, tuple(overrides or ()))
    from flows.command import run_here

    run_here(config, name or Path(preset).stem, again=again)


@commands.command(rich_help_panel=PANEL)
def settings() -> None:
    """List every setting with its default and meaning."""
    from flows.config import describe

    for line in describe():
        typer.echo(line)
