"""The panel "Run" of `rollmill --help`: commands that generate and train."""

from functools import partial
from typing import Annotated

import typer

from rollmill.flows.commands.options import Again, Overrides, Preset, RedoFailed, RunLocation

PANEL = "Run"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def run(
    preset: Preset,
    name: Annotated[
        str, typer.Option(help="Folder of the run below store.root; default: the preset's name.")
    ] = "",
    overrides: Overrides = None,
    again: Again = False,
    redo_failed: RedoFailed = False,
    deployment: Annotated[
        bool,
        typer.Option(
            "--deployment", help="Let a worker run it, as a flow run of the deployment post-train/PRESET."
        ),
    ] = False,
    deployed_as: Annotated[
        str, typer.Option(metavar="NAME", help="Use the deployment post-train/NAME instead.")
    ] = "",
) -> None:
    """Run the flow post-train here or by a deployment; resumes an unfinished run of the same name."""
    from rollmill.flows.configuration.settings import load

    config = load(preset, tuple(overrides or ()))
    from rollmill.flows.configuration.presets import preset_name, preset_task

    name = name or preset_name(preset)
    if deployment or deployed_as:
        from rollmill.flows.prefect_integration.prefect_api import connect_to_prefect

        connect_to_prefect()
        from rollmill.flows.commands.deployment_run import run_deployment

        deployment_name = deployed_as or preset_task(preset)
        run_deployment(config, name, deployment_name, again=again, redo_failed=redo_failed)
    else:
        from rollmill.flows.commands.new_runs import run_here

        run_here(config, name, again=again, redo_failed=redo_failed)


@commands.command(rich_help_panel=PANEL)
def collect(
    preset: Preset,
    name: Annotated[
        str,
        typer.Option(help="Folder of the run below store.root; default: the preset's name and -collected."),
    ] = "",
    overrides: Overrides = None,
    again: Again = False,
    redo_failed: RedoFailed = False,
) -> None:
    """Run the flow collect here: rollouts and scores by the start model, for rescore and retrain; trains nothing."""
    from rollmill.flows.configuration.settings import load

    config = load(preset, tuple(overrides or ()))
    from rollmill.flows.commands.new_runs import collect_here
    from rollmill.flows.configuration.presets import preset_name

    collect_here(config, name or f"{preset_name(preset)}-collected", again=again, redo_failed=redo_failed)


@commands.command("import", rich_help_panel=PANEL)
def import_logs(
    preset: Preset,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Logged conversations: JSON Lines of chats or of OpenTelemetry's spans, Parquet, or a folder of these.",
        ),
    ],
    name: Annotated[
        str,
        typer.Option(help="Folder of the run below store.root; default: the preset's name and -imported."),
    ] = "",
    redo_failed: Annotated[
        bool,
        typer.Option("--redo-failed", help="Score again what the scorer failed on, in unfinished steps."),
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Store conversations that another system logged as rollouts of a run, and score them; run it again to add new ones."""
    from rollmill.flows.configuration.settings import load

    config = load(preset, tuple(overrides or ()))
    from rollmill.flows.commands.new_runs import import_here
    from rollmill.flows.configuration.presets import preset_name

    import_here(config, name or f"{preset_name(preset)}-imported", files, redo_failed=redo_failed)


@commands.command(rich_help_panel=PANEL)
def fork(
    run: RunLocation,
    step: Annotated[
        int,
        typer.Argument(metavar="STEP", min=0, help="First step of the new run; the steps before are copied."),
    ],
    name: Annotated[str, typer.Option(help="Folder of the new run below store.root.")],
    overrides: Overrides = None,
) -> None:
    """Begin a run at a step of another, with other settings, and run it; the same command resumes it."""
    from rollmill.flows.commands.new_runs import fork_here
    from rollmill.tasks.store.run.run_search import find_run

    fork_here(find_run(run), step, name, tuple(overrides or ()))


@commands.command(rich_help_panel=PANEL)
def compact(
    run: RunLocation,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=3600.0,
            help="Seconds that superseded shards stay for readers; default: the run's setting.",
        ),
    ] = None,
) -> None:
    """Merge the many small shards of a run into few; no process may write to the run."""
    import asyncio

    from rollmill.flows.commands.stored_runs import compact_run
    from rollmill.tasks.store.run.run_search import find_run

    typer.echo(asyncio.run(compact_run(find_run(run), grace, partial(typer.echo, err=True))))


@commands.command(rich_help_panel=PANEL)
def settings(
    preset: Annotated[
        str, typer.Argument(help="Show the values of this preset, and the arguments of its plug-ins.")
    ] = "",
    overrides: Overrides = None,
) -> None:
    """List every setting with its default and meaning, or with the value that a preset or --set gives it."""
    from textwrap import fill

    from rollmill.flows.configuration.config import RunConfig
    from rollmill.flows.configuration.presets import preset_values
    from rollmill.flows.configuration.settings import apply_overrides, describe, parse_settings
    from rollmill.tasks.look.terminal.output import open_console, terminal_width

    values = apply_overrides(preset_values(preset) if preset else {}, overrides or ())
    config, arguments = parse_settings(RunConfig, values), {}
    if values:
        from rollmill.flows.checks.plug_in_arguments import describe_plug_in_arguments

        arguments = describe_plug_in_arguments(config)
    width = terminal_width(open_console())
    for line in describe(config, arguments):
        typer.echo(
            fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            if width
            else line
        )


@commands.command(rich_help_panel=PANEL)
def memory(
    preset: Preset,
    overrides: Overrides = None,
    gpu: Annotated[
        float,
        typer.Option(
            help="Memory of each GPU in GB, such as 80, to compare with; 0: this machine's GPUs.", min=0.0
        ),
    ] = 0.0,
) -> None:
    """Compute the memory of a trainer rank and of a server, and say what to change if a GPU has less (docs/lab/scale.md)."""
    from rollmill.flows.checks.memory_report import memory_lines
    from rollmill.flows.configuration.settings import load

    for line in memory_lines(load(preset, tuple(overrides or ())), gpu):
        typer.echo(line)
