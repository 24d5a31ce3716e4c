"""Commands that generate and train."""

from functools import partial
from typing import Annotated

import typer

from flows.commands.options import Again, Overrides, Preset, RedoFailed, RunLocation

PANEL = "Run"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def run(
    preset: Preset,
    name: Annotated[
        str, typer.Option(help="Folder of the run below store.root; the preset's name by default.")
    ] = "",
    overrides: Overrides = None,
    again: Again = False,
    redo_failed: RedoFailed = False,
    deployment: Annotated[
        bool,
        typer.Option(
            "--deployment", help="Have a worker run it: a flow run of the deployment post-train/PRESET."
        ),
    ] = False,
    deployed_as: Annotated[
        str, typer.Option(metavar="NAME", help="That of the deployment post-train/NAME instead.")
    ] = "",
) -> None:
    """Run the flow post-train here, or by a deployment; an unfinished run of that name is gone on with."""
    from flows.settings import load

    config = load(preset, tuple(overrides or ()))
    from flows.commands.starting import run_deployed, run_here
    from flows.presets import preset_name, task_of

    name = name or preset_name(preset)
    if deployment or deployed_as:
        run_deployed(config, name, deployed_as or task_of(preset), again=again, redo_failed=redo_failed)
    else:
        run_here(config, name, again=again, redo_failed=redo_failed)


@commands.command(rich_help_panel=PANEL)
def collect(
    preset: Preset,
    name: Annotated[
        str,
        typer.Option(help="Folder of the run below store.root; the preset's name and -collected by default."),
    ] = "",
    overrides: Overrides = None,
    again: Again = False,
    redo_failed: RedoFailed = False,
) -> None:
    """Run the flow collect here: rollouts and scores by the start model, to rescore and retrain from; nothing trains."""
    from flows.settings import load

    config = load(preset, tuple(overrides or ()))
    from flows.commands.starting import collect_here
    from flows.presets import preset_name

    collect_here(config, name or f"{preset_name(preset)}-collected", again=again, redo_failed=redo_failed)


@commands.command(rich_help_panel=PANEL)
def fork(
    run: RunLocation,
    step: Annotated[
        int,
        typer.Argument(metavar="STEP", min=0, help="First step of the new run; those before are brought."),
    ],
    name: Annotated[str, typer.Option(help="Folder of the new run below store.root.")],
    overrides: Overrides = None,
) -> None:
    """Begin a run at a step of another, with other settings, and run it; given again, it goes on."""
    from flows.commands.fork import prepare_fork
    from flows.commands.starting import run_here
    from flows.running.folder import existing_run

    run_here(prepare_fork(existing_run(run), step, name, tuple(overrides or ())), name, again=False)


@commands.command(rich_help_panel=PANEL)
def compact(
    run: RunLocation,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Seconds that superseded shards stay for readers; the run's setting by default."
        ),
    ] = None,
) -> None:
    """Put the many small shards of a run that is not going on into few."""
    import asyncio

    from flows.commands.compaction import compact_run
    from flows.running.folder import existing_run

    typer.echo(asyncio.run(compact_run(existing_run(run), grace, partial(typer.echo, err=True))))


@commands.command(rich_help_panel=PANEL)
def settings() -> None:
    """List every setting with its default and meaning."""
    from flows.settings import describe

    for line in describe():
        typer.echo(line)


@commands.command(rich_help_panel=PANEL)
def memory(preset: Preset, overrides: Overrides = None) -> None:
    """Compute what a trainer rank of a preset keeps in memory, and a server of weights and cache (docs/scale.md)."""
    from flows.checks.memory import memory_lines
    from flows.settings import load

    for line in memory_lines(load(preset, tuple(overrides or ()))):
        typer.echo(line)
