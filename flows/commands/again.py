"""Commands that use what was generated before once more: other rewards, other training, the same steps again."""

from typing import Annotated

import typer

from flows.commands.options import Overrides, RunLocation

PANEL = "Again"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def rescore(
    run: RunLocation,
    scorer: Annotated[
        str, typer.Option(help="Registered name, or package.module:attribute; the run's own by default.")
    ] = "",
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B - 1 alone.")] = "",
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Score stored held-out trajectories too.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Score a run's stored rollouts with another scorer; what it has scored already is kept."""
    from flows.again import rescore_config, rescore_here
    from flows.folder import existing_run

    folder = existing_run(run)
    config = rescore_config(folder, tuple(overrides or ()), scorer, steps, evaluations=evaluations)
    rescore_here(folder, config)
