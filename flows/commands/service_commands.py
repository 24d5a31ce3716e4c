"""The panel "Services" of `rollmill --help`: commands that start and stop what flows connect to."""

from typing import Annotated

import typer

from rollmill.flows.commands.options import Overrides, Preset
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.store.config import StoreConfig

PANEL = "Services"
commands = typer.Typer()

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")]


@commands.command(rich_help_panel=PANEL)
def doctor(
    preset: Annotated[
        str | None, typer.Argument(help="Preset whose serve.python and store.root are checked.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help=f"Python of the environment with vLLM; default: the preset's, or {ServeConfig().python}.",
            show_default=False,
        ),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(
            help=f"Folder of runs, or s3://bucket/prefix; default: the preset's, or {StoreConfig().root}.",
            show_default=False,
        ),
    ] = None,
    services: Annotated[
        bool, typer.Option("--services/--no-services", help="Start a trainer and a vLLM server too.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of lines.")] = False,
) -> None:
    """Check this machine: Python, environments, Prefect, GPUs, a trainer, a vLLM server, a sync by each transport; in about two minutes.

    Exit status 1: something failed; its line has the remedy.
    """
    from rollmill.flows.commands.doctor import examine
    from rollmill.flows.configuration.settings import load

    serve, store = ServeConfig(), StoreConfig()
    if preset:
        config = load(preset)
        serve, store = config.serve, config.store
    if not examine(python or serve.python, root or store.root, with_services=services, as_json=as_json):
        raise typer.Exit(1)


@commands.command(rich_help_panel=PANEL)
def up(
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Loopback port of the server; default: the first free one from 4200 on.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start the local Prefect server in the background."""
    from rollmill.flows.prefect_integration import local_server

    running = local_server.status()
    if running and port not in (None, running.port):
        remedy = f"the Prefect server of this folder runs at {running.ui_url}; use it, or stop it first: `rollmill down`"
        raise ConfigError("--port", port, remedy)
    typer.echo(f"Prefect UI: {local_server.up(port=port)}")


@commands.command(rich_help_panel=PANEL)
def down() -> None:
    """Stop the local Prefect server."""
    from rollmill.flows.prefect_integration import local_server

    typer.echo("stopped" if local_server.down() else "no local Prefect server was running")


@commands.command(rich_help_panel=PANEL)
def deploy(
    pool: Annotated[
        str, typer.Option(metavar="process|docker|kubernetes", help="Kind of the work pool for the runs.")
    ] = "process",
    overrides: Overrides = None,
) -> None:
    """Create a work pool and every deployment of prefect.yaml on the Prefect server."""
    from rollmill.flows.prefect_integration.deployments import deploy_all

    deploy_all(pool, tuple(overrides or ()))


@commands.command(rich_help_panel=PANEL)
def trainer(
    preset: Preset,
    overrides: Overrides = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="Machines that share the ranks; run this command on each.")
    ] = 1,
    node: Annotated[
        int, typer.Option(min=0, help="Number of this machine, from 0; flows connect to number 0.")
    ] = 0,
    rendezvous: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address on machine 0 where the machines meet.")
    ] = "127.0.0.1:0",
    host: Annotated[str, typer.Option(help="Address that the control API listens on.")] = "127.0.0.1",
    port: Port = 0,
) -> None:
    """Run a trainer, or one machine's ranks of it, in the foreground, for flows to attach to."""
    from rollmill.flows.commands.foreground import trainer_here
    from rollmill.flows.configuration.settings import load
    from rollmill.tasks.train.service.launch import Nodes

    trainer_here(load(preset, tuple(overrides or ())), Nodes(nodes, node, rendezvous), host, port)


@commands.command(rich_help_panel=PANEL)
def vllm(
    preset: Preset,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address that the server listens on.")] = "127.0.0.1",
    port: Port = 0,
) -> None:
    """Run a vLLM server in the foreground, for flows to attach to."""
    from rollmill.flows.commands.foreground import vllm_here
    from rollmill.flows.configuration.settings import load

    vllm_here(load(preset, tuple(overrides or ())), host, port)
