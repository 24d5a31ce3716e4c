"""Which Prefect server the flows of this process talk to, and how they talk to it."""

import os

import typer

from flows.deploying import server

QUIET_TERMINAL = {
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "DO_NOT_TRACK": "1",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}
"""The UI keeps the flow's log; the terminal shows the progress bar, and an error once."""

SHORT_RETRIES = {"PREFECT_CLIENT_MAX_RETRIES": "2"}
"""A request to a Prefect server that is gone gives up after about 6 s, and not after a minute."""


def lead_to_prefect(*, says_on_stderr: bool = False) -> None:
    """Find or start the Prefect server that flows of this process talk to; Prefect is imported only afterwards.

    Where its UI is, is said on standard output, unless that is for a program to read.

    Raises:
        ConfigError, ServiceStartError: there is none, and none can be started.
    """
    os.environ |= {k: v for k, v in (QUIET_TERMINAL | SHORT_RETRIES).items() if k not in os.environ}
    os.environ["PREFECT_API_URL"] = server.ensure()
    ui_url = os.environ["PREFECT_API_URL"].removesuffix("/api")
    typer.echo(f"Prefect UI: {ui_url}", err=says_on_stderr)
