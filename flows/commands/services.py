"""Commands that start and stop what flows talk to."""

from typing import Annotated

import typer

from flows.commands.options import Overrides, Preset
from tasks.errors import ConfigError

PANEL = "Services"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def up(
    port: Annotated[
        int | None, typer.Option(help="Loopback port of the server; 4200 by default.", show_default=False)
    ] = None,
) -> None:
    """Start the local Prefect server in the background."""
    from flows.deploying import server

    there = server.status()
    if there and port not in (None, there.port):
        remedy = f"the Prefect server of this folder runs at {there.ui_url}; use that, or end it first: `rollmill down`"
        raise ConfigError("--port", port, remedy)
    typer.echo(f"Prefect UI: {server.up(port=port or server.PORT)}")


@commands.command(rich_help_panel=PANEL)
def down() -> None:
    """Stop the local Prefect server."""
    from flows.deploying import server

    typer.echo("stopped" if server.down() else "no local Prefect server was running")


@commands.command(rich_help_panel=PANEL)
def deploy(
    pool: Annotated[
        str, typer.Option(metavar="process|docker|kubernetes", help="Kind of the work pool that runs go to.")
    ] = "process",
    overrides: Overrides = None,
) -> None:
    """Give the Prefect server a work pool, and every deployment of prefect.yaml."""
    from flows.deploying.deployments import deploy_all

    deploy_all(pool, tuple(overrides or ()))


@commands.command(rich_help_panel=PANEL)
def trainer(
    preset: Preset,
    overrides: Overrides = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="Machines that the ranks are spread over; run this on each.")
    ] = 1,
    node: Annotated[
        int, typer.Option(min=0, help="Number of this machine; flows talk to that of number 0.")
    ] = 0,
    rendezvous: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Of machine 0, where several meet.")
    ] = "127.0.0.1:0",
    host: Annotated[str, typer.Option(help="Address that the control API listens on.")] = "127.0.0.1",
) -> None:
    """Run a trainer in the foreground, for flows to attach to; of several machines one's part of it."""
    from flows.commands.foreground import trainer_here
    from flows.settings import load
    from tasks.train.launch import Nodes

    trainer_here(load(preset, tuple(overrides or ())), Nodes(nodes, node, rendezvous), host)


@commands.command(rich_help_panel=PANEL)
def vllm(preset: Preset, overrides: Overrides = None) -> None:
    """Run a vLLM server in the foreground, for flows to attach to."""
    from flows.commands.foreground import vllm_here
    from flows.settings import load

    vllm_here(load(preset, tuple(overrides or ())))
