"""Sending again after transient errors; nothing is logged of it, since what was sent again is a metric."""

from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import stamina
from stamina.instrumentation import RetryDetails, set_on_retry_hooks

from tasks.observe.spans import span


@contextmanager
def _waiting(details: RetryDetails) -> Iterator[None]:
    """The wait before the next attempt, whose cause is what went wrong."""
    with span("waiting_to_retry", cause=type(details.caused_by).__name__):
        yield


set_on_retry_hooks((_waiting,))


class Attempts(Iterable[stamina.Attempt], AsyncIterable[stamina.Attempt], Protocol):
    """What `retries` gives: `for` waits in the thread it runs in, `async for` in the event loop."""


def retries(
    on: type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool],
    *,
    attempts: int,
    backoff_s: float,
    longest_s: float,
) -> Attempts:
    """Attempts to iterate over, each a context manager; the last one raises.

    Args:
        on: errors after which the next attempt follows, or what says so of an error.
        attempts: at most, the first included.
        backoff_s: wait before the second attempt, doubled each time, with jitter of as much.
        longest_s: longest wait.
    """
    return stamina.retry_context(
        on=on,
        attempts=attempts,
        timeout=None,
        wait_initial=backoff_s,
        wait_jitter=backoff_s,
        wait_max=longest_s,
    )
