"""The command `rollmill`: parses first, imports what a command needs afterwards.

The commands lie in flows/commands, a module for each panel of `rollmill --help`; each command imports what it needs
in its body, so that parsing stays fast.
"""

import sys
from io import TextIOWrapper
from pathlib import Path

import typer

from flows.commands import again, look, run, services
from tasks.errors import ConfigError, RollmillError, masked

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Batch reinforcement learning for language models whose loop is a workflow.",
)
for _panel in (run, look, again, services):
    app.add_typer(_panel.commands)


def main() -> None:
    """Run the command; an expected error is one message and exit status 1, or 2 for a wrong setting.

    What the terminal's encoding does not have is printed as an escape.
    Modules of one's own, which settings name by import path, are found in the working folder too.
    """
    sys.path.append(str(Path.cwd()))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except RollmillError as error:
        from flows.looking.view import visible

        typer.echo(f"rollmill: {visible(masked(str(error)))}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
