"""How a command that ran a flow ends: with the right status, and soon, also when Prefect's server is gone."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from prefect.exceptions import TerminationSignal

from flows.failure import PREFECT_ERRORS, behind
from tasks.errors import RollmillError

GOES_ON = "stopped; the same command goes on from here"
STOPS = (KeyboardInterrupt, TerminationSignal, asyncio.CancelledError)


@contextmanager
def flow_command(
    is_done: Callable[[], bool], exit_timeout_s: float, if_stopped: str = GOES_ON
) -> Iterator[None]:
    """Run a flow as the last thing of this process.

    What is done (`is_done`, by what lies in the run's folder), stopped or failed ends as such when Prefect's server could not be told of it. From then
    on the process lives for `exit_timeout_s` seconds at most: Prefect sends its last logs and events at exit, and
    would try for minutes when its server is gone. All data of the run is stored by then. Of one that was stopped `if_stopped` is said.

    Raises:
        SystemExit: a signal stopped the run.
        RollmillError: it failed.
    """
    status = 1
    try:
        yield
        status = 0
    except (*STOPS, *PREFECT_ERRORS) as error:
        errors = list(behind(error))
        failure = next((each for each in errors if isinstance(each, RollmillError)), None)
        if isinstance(error, PREFECT_ERRORS):
            typer.echo(f"Prefect's server could not be told of the run's end ({error})", err=True)
        if any(isinstance(each, STOPS) for each in errors):
            typer.echo(if_stopped, err=True)
            status = _status(errors)
            raise SystemExit(status) from None
        if failure:
            raise failure from None
        if not is_done():
            raise
        status = 0
    finally:
        _exit_within(exit_timeout_s, status)


def _status(errors: list[BaseException]) -> int:
    """What a shell expects of a process that a signal ended."""
    signals = [each.signal for each in errors if isinstance(each, TerminationSignal)]
    return 128 + (signals[0] if signals else signal.SIGINT)


def _exit_within(timeout_s: float, status: int) -> None:
    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(timeout_s, leave)
    timer.daemon = True
    timer.start()
