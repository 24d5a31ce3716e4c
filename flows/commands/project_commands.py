"""The panel "Project" of `rollmill --help`: commands that write files of a project, and make its second environment."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

PANEL = "Project"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the project, new or without its files.")
    ],
) -> None:
    """Write a project: a preset, its deployments, an environment, a scorer, tests and a README; existing files are not overwritten."""
    from rollmill.flows.project.new_files import PRESET, write_project

    # A checkout's environment for vLLM serves its projects, too.
    vllm_python = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    has_vllm = vllm_python.exists()
    for file in write_project(folder, str(vllm_python) if has_vllm else ""):
        typer.echo(f"wrote {file}")
    enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    typer.echo(f"Next: {enter}{'' if has_vllm else 'rollmill setup && '}rollmill run {PRESET}")


@commands.command(rich_help_panel=PANEL)
def new(
    kind: Annotated[str, typer.Argument(metavar="scorer|environment|loss", help="What to write.")],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the module: NAME.py and tests/test_NAME.py.")
    ],
) -> None:
    """Write a scorer, an environment or a loss with its test, in this folder; existing files are not overwritten."""
    from rollmill.flows.project.new_files import SETTINGS, import_path, write_code

    for file in write_code(Path(), kind, name):
        typer.echo(f"wrote {file}")
    typer.echo(f"Use it: --set {SETTINGS[kind]}={import_path(kind, name)}")


@commands.command(rich_help_panel=PANEL)
def setup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the environment.")] = Path(
        ".venv-vllm"
    ),
    build: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda", help="Build of vLLM; default: cuda with an NVIDIA GPU, otherwise cpu."
        ),
    ] = "",
) -> None:
    """Make the environment with vLLM that runs need, or bring it up to date."""
    from rollmill.flows.project.vllm_environment import make_vllm_environment

    make_vllm_environment(folder, build, typer.echo)
