"""The command `rollmill`: parses first, imports what a command needs afterwards."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from tasks.errors import ConfigError, RollmillError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Preset = Annotated[str, typer.Argument(help="Name of a preset in conf/, or path of a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, for example train.lr=1e-6; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def up(port: Annotated[int, typer.Option(help="Loopback port of the server.")] = 4200) -> None:
    """Start the local Prefect server in the background."""
    from flows import server

    typer.echo(f"Prefect UI: {server.up(port=port)}")


@app.command()
def down() -> None:
    """Stop the local Prefect server."""
    from flows import server

    typer.echo("stopped" if server.down() else "no local Prefect server was running")


@app.command()
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


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    step: Annotated[int | None, typer.Option(help="Show the groups of this step.")] = None,
    group: Annotated[int | None, typer.Option(help="Show the trajectories of this group.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run's data sets hold."""
    from rich.console import Console

    from flows.inspection import view

    shown = view(folder, step=step, group=group)
    if as_json:
        typer.echo(json.dumps(shown.values, default=str))
    else:
        Console().print(shown.table())


@app.command()
def trainer(preset: Preset, overrides: Overrides = None) -> None:
    """Run a trainer in the foreground, for flows to attach to."""
    from flows.command import trainer_here
    from flows.config import load

    trainer_here(load(preset, tuple(overrides or ())))


@app.command()
def vllm(preset: Preset, overrides: Overrides = None) -> None:
    """Run a vLLM server in the foreground, for flows to attach to."""
    from flows.command import vllm_here
    from flows.config import load

    vllm_here(load(preset, tuple(overrides or ())))


@app.command()
def settings() -> None:
    """List every setting with its default and meaning."""
    from flows.config import describe

    for line in describe():
        typer.echo(line)


def main() -> None:
    """Run the command; an expected error is one message and exit status 1, or 2 for a wrong setting.

    Modules of one's own, which settings name by import path, are found in the working folder too.
    """
    sys.path.append(str(Path.cwd()))
    try:
        app()
    except RollmillError as error:
        typer.echo(f"rollmill: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
