"""The Prefect server that the flows of this process use, and Prefect's client settings."""

import os

import typer

from rollmill.flows.prefect_integration import local_server

# The UI has the flow's log; the terminal shows the progress bar, and an error only once.
QUIET_TERMINAL = {
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # Otherwise each event that a dead server does not take is printed whole.
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "DO_NOT_TRACK": "1",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}

# A request to a server that has ended fails after about 6 s instead of a minute.
SHORT_RETRIES = {"PREFECT_CLIENT_MAX_RETRIES": "2"}


def connect_to_prefect(*, prints_to_stderr: bool = False) -> None:
    """Find or start the Prefect server, set Prefect's environment variables, and print the address of the UI.

    To be called before Prefect is imported.

    Args:
        prints_to_stderr: print the address to standard error, for commands whose output a program reads.

    Raises:
        ConfigError, ServiceStartError: there is no server, and none could be started.
    """
    # A variable that the user has set stays.
    os.environ |= {k: v for k, v in (QUIET_TERMINAL | SHORT_RETRIES).items() if k not in os.environ}
    os.environ["PREFECT_API_URL"] = local_server.ensure()
    ui_url = os.environ["PREFECT_API_URL"].removesuffix("/api")
    typer.echo(f"Prefect UI: {ui_url}", err=prints_to_stderr)
