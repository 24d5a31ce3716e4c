"""Which error counts: one out of many, and those of Prefect's server, without which a run goes on."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.exceptions import PrefectException

from tasks.errors import RollmillError

PREFECT_ERRORS = (httpx.HTTPError, PrefectException, TimeoutError)
"""What a call of Prefect's API raises when its server is gone, too slow, or refuses."""


@contextmanager
def one_error() -> Iterator[None]:
    """Raise the first Rollmill error of an exception group, or its first error, in place of the group.

    To be used in coroutines. Python 3.11 and 3.12 leave the task whose TaskGroup failed as one that is being cancelled: an
    `asyncio.timeout` around the group would, once it is over, end with CancelledError in place of TimeoutError. That is taken
    back here. A time limit that begins after the group's end is one by itself, from Python 3.11.4 on.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    except BaseExceptionGroup as group:
        while task and task.cancelling() > before:
            task.uncancel()
        raise _leaf(group) from group


def behind(error: BaseException) -> Iterator[BaseException]:
    """An error, and all that it was raised from, or while they were handled; nearest first."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop(0)
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


def _leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if isinstance(leaf, RollmillError)), leaves[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
