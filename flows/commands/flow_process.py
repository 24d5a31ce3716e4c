"""A flow as the last thing that a command's process does: Prefect's server first, the right exit status at the end."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

from rollmill.flows.prefect_integration.prefect_api import connect_to_prefect
from rollmill.tasks.errors import RollmillError
from rollmill.tasks.observe.spans import span
from rollmill.tasks.user_code.left_threads import EXIT_TIMEOUT_S, exit_within, run_to_end

RESUMABLE = "stopped; run the same command again to resume"
UNCHANGED = "stopped; the run is unchanged, run the same command to start over"
NOT_COMPARED = "stopped; not everything was compared, run the same command to start over"

Result = TypeVar("Result")


def run_flow(
    call: Callable[[], Coroutine[Any, Any, Result]],
    *,
    before: Callable[[], object] = lambda: None,
    is_done: Callable[[], bool] = lambda: False,
    if_stopped: str = RESUMABLE,
    prints_json: bool = False,
) -> Result:
    """Run a flow in this process, against the server of PREFECT_API_URL or a local one; returns the flow's result.

    Args:
        call: imports the flow and calls it with its arguments.
        before: called once there is a Prefect server, before the flow begins.
        is_done: reads from the run's folder whether the flow did its work.
        if_stopped: message for a flow that a signal stopped.
        prints_json: standard output is for a program to read.

    Raises:
        ConfigError, ServiceStartError: there is no Prefect server, and none could be started.
        SystemExit: a signal stopped the flow.
        RollmillError: the flow failed.
    """
    with span("starting", cause="Prefect"):
        connect_to_prefect(prints_to_stderr=prints_json)
    with exit_in_time(is_done, EXIT_TIMEOUT_S, if_stopped):
        # Prefect reads its settings when it is imported, so `call` imports the flow, now that the server's address is known.
        before()
        return run_to_end(call)


@contextmanager
def exit_in_time(
    is_done: Callable[[], bool], exit_timeout_s: float = EXIT_TIMEOUT_S, if_stopped: str = RESUMABLE
) -> Iterator[None]:
    """Give this process the exit status that fits how the flow in the block ended, and end it soon after the block.

    Prefect's errors do not count if the run's folder shows that the flow did its work: the server could not record that.

    Args:
        is_done: reads from the run's folder whether the flow did its work.
        exit_timeout_s: seconds after the block within which the process ends.
        if_stopped: message for a flow that a signal stopped.

    Raises:
        SystemExit: a signal stopped the flow.
        RollmillError: the flow failed.
    """
    # Prefect may be imported only now; see `run_flow`.
    import httpx
    from prefect.exceptions import TerminationSignal

    from rollmill.flows.failure import PREFECT_ERRORS, FailedRequestError, causes

    stops = (KeyboardInterrupt, TerminationSignal, asyncio.CancelledError)
    status = 1
    try:
        yield
        status = 0
    except (*stops, *PREFECT_ERRORS) as error:
        errors = list(causes(error))
        failure = next((each for each in errors if isinstance(each, RollmillError)), None)
        is_stopped = any(isinstance(each, stops) for each in errors)
        if isinstance(error, httpx.HTTPError) and not (failure or is_stopped or is_done()):
            failure = FailedRequestError(error, if_stopped.removeprefix("stopped; "))
        elif isinstance(error, PREFECT_ERRORS):
            typer.echo(f"Prefect's server did not record how the run ended ({error})", err=True)
        if is_stopped:
            typer.echo(if_stopped, err=True)
            numbers = [each.signal for each in errors if isinstance(each, TerminationSignal)]
            # The status that a shell expects of a process that a signal ended.
            status = 128 + (numbers[0] if numbers else signal.SIGINT)
            raise SystemExit(status) from None
        if failure:
            raise failure from None
        if not is_done():
            raise
        status = 0
    finally:
        # Prefect sends its last logs and events at exit, and retries for minutes if its server has ended.
        exit_within(exit_timeout_s, status)
