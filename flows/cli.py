"""The command `rollmill`: parses first, then imports what the command needs.

flows/commands has a module for each panel of `rollmill --help`. Each command imports what it needs in its body, so that parsing
is fast.
"""

import os
import sys
from contextlib import suppress
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated

import typer

from rollmill.flows.commands import (
    again_commands,
    look_commands,
    policy_commands,
    project_commands,
    run_commands,
    service_commands,
)
from rollmill.tasks.errors import ConfigError, RollmillError, mask_credentials, show_value
from rollmill.tasks.processes.python_child import append_user_path
from rollmill.tasks.user_code.left_threads import EXIT_TIMEOUT_S, exit_within

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Batch reinforcement learning for language models whose loop is a workflow.",
)
for _panel in (
    run_commands,
    look_commands,
    again_commands,
    policy_commands,
    project_commands,
    service_commands,
):
    app.add_typer(_panel.commands)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"rollmill {version('rollmill')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Accept the options that come before a subcommand: --version prints the version and exits."""


def main() -> None:
    """Run the command as this process, which ends with it: threads that user code has left running do not keep it."""
    try:
        run_command()
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code:
            exit_within(EXIT_TIMEOUT_S, stop.code)
        raise


def run_command() -> None:
    """Run the command; an expected error prints one message and exits with status 1, or 2 for a wrong setting.

    Modules that settings name by import path are found in the working folder too. Characters that the terminal's encoding
    lacks are printed as escapes. A library that is not installed is reported with the extra that installs it.
    """
    # Last on the path, so that a file of the user never shadows a module of the standard library or ours.
    append_user_path()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except OSError as error:
        # Without a standard output there is nothing to close.
        with suppress(OSError, AttributeError):
            # What was not written must not be tried again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        file = f": {show_value(error.filename)}" if error.filename else ""
        typer.echo(f"rollmill: {error.strerror or str(error) or type(error).__name__}{file}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        from rollmill.flows.commands.missing_extra import find_extra

        extra = find_extra(error.name or "")
        if not extra:
            raise
        typer.echo(f"rollmill: this needs {error.name}: pip install 'rollmill[{extra}]'", err=True)
        sys.exit(1)
    except RollmillError as error:
        from rollmill.tasks.look.tables.view import escape_controls

        typer.echo(f"rollmill: {escape_controls(mask_credentials(str(error)))}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
