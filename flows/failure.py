"""Errors of concurrent tasks as one error, causes of an error, and the errors of Prefect's server."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.exceptions import PrefectException

from rollmill.tasks.errors import RollmillError

# Errors of a Prefect API call whose server has ended, is too slow, or refuses; a run continues without the server.
PREFECT_ERRORS = (httpx.HTTPError, PrefectException, TimeoutError)


class FailedRequestError(RollmillError):
    """A request to Prefect's server failed that a flow cannot do without."""

    def __init__(self, error: httpx.HTTPError, remedy: str) -> None:
        # What follows the dash repeats it, or names a page about HTTP.
        what = str(error).partition(" - ")[0] or type(error).__name__
        super().__init__(
            f"a request to Prefect's server failed ({what}): it may have ended, or be overloaded; {remedy}"
        )


@contextmanager
def one_error() -> Iterator[None]:
    """In the block, raise one error instead of an exception group: its first RollmillError, otherwise its first error.

    For use in coroutines.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    except BaseExceptionGroup as group:
        # Python 3.11 and 3.12 leave the task whose TaskGroup failed marked as being cancelled. An `asyncio.timeout` around the
        # group would then end with CancelledError instead of TimeoutError.
        while task and task.cancelling() > before:
            task.uncancel()
        leaves = list(_leaves(group))
        raise next((leaf for leaf in leaves if isinstance(leaf, RollmillError)), leaves[0]) from group


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors that it was raised from or while handling, nearest first."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop(0)
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
