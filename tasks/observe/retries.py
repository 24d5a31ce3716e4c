"""Sending again after transient errors; nothing is logged of it, since what was sent again is a metric."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import stamina
from stamina.instrumentation import RetryDetails, set_on_retry_hooks

from tasks.observe.spans import span


@contextmanager
def _waiting(details: RetryDetails) -> Iterator[None]:
    """The wait before the next attempt, whose cause is what went wrong."""
    with span("waiting_to_retry", cause=type(details.caused_by).__name__):
        yield


set_on_retry_hooks((_waiting,))


class StaminaAttempts(Iterable[stamina.Attempt], AsyncIterable[stamina.Attempt], Protocol):
    """All attempts, made by stamina."""


class FirstAttempt:
    """Keeps the error that ends it.

    Attributes:
        error: None as long as there is none.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None


Attempt: TypeAlias = FirstAttempt | stamina.Attempt


class Attempts:
    """Attempts to iterate over once: `for` waits in the thread it runs in, `async for` in the event loop.

    Stamina is asked only when the first has failed: it makes some fifty objects for each request, in cycles that only the
    garbage collector frees.

    Args:
        every: gives all attempts, the first included.
    """

    def __init__(self, every: Callable[[], StaminaAttempts]) -> None:
        self._every, self._first = every, FirstAttempt()
        self._others: AsyncIterator[stamina.Attempt] | None = None
        self._is_begun = False

    def __iter__(self) -> Iterator[Attempt]:
        yield self._first
        if self._first.error is not None:
            others = iter(self._every())
            _end(next(others), self._first.error)
            yield from others

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Attempt:
        if not self._is_begun:
            self._is_begun = True
            return self._first
        if self._first.error is None:
            raise StopAsyncIteration
        if self._others is None:
            self._others = aiter(self._every())
            _end(await anext(self._others), self._first.error)
        return await anext(self._others)


def _end(attempt: stamina.Attempt, error: Exception) -> None:
    """End an attempt with an error, which decides whether another follows, and when."""
    attempt.__exit__(type(error), error, error.__traceback__)


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
    return Attempts(
        partial(
            stamina.retry_context,
            on=on,
            attempts=attempts,
            timeout=None,
            wait_initial=backoff_s,
            wait_jitter=backoff_s,
            wait_max=longest_s,
        )
    )
