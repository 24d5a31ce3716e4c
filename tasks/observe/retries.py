"""Repeat what failed with a transient error. Attempts are not logged: the callers count them in metrics."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeAlias

from rollmill.tasks.observe.spans import OpenSpan, span

Transient: TypeAlias = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]


class Retries:
    """Iterable of attempts at something that may fail, with growing waits between them; to be used once.

    `for` waits in its thread, `async for` in the event loop. Each attempt is a context manager: it suppresses a transient error,
    and the last one raises it. Each wait is a span `waiting_to_retry`, with the error as its cause.

    Args:
        on: errors to retry after, or a function that returns True for them.
        attempts: largest number of attempts, the first included.
        backoff_s: seconds before the second attempt, doubled each time, plus a random part of up to as much.
        longest_s: longest wait in seconds.

    Example:
        for attempt in Retries(OSError, attempts=3, backoff_s=0.1, longest_s=1.0):
            with attempt:
                return send()
    """

    def __init__(self, on: Transient, *, attempts: int, backoff_s: float, longest_s: float) -> None:
        self._on, self._attempts, self._backoff_s, self._longest_s = on, attempts, backoff_s, longest_s
        self._number = 0
        self._error: Exception | None = None

    def __enter__(self) -> None:
        self._error = None

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> bool:
        # The last attempt raises, and so does a cancellation, which is no Exception.
        if (
            not isinstance(error, Exception)
            or self._number >= self._attempts
            or not self._is_transient(error)
        ):
            return False
        self._error = error
        return True

    def __iter__(self) -> Iterator[Self]:
        while self._begin():
            if self._error is not None:
                with self._wait_span():
                    time.sleep(self._wait_s())
            yield self

    def __aiter__(self) -> Self:
        return self

    # An async generator would need an extra task to close it whenever a caller returns out of the loop.
    async def __anext__(self) -> Self:
        if not self._begin():
            raise StopAsyncIteration
        if self._error is not None:
            with self._wait_span():
                await asyncio.sleep(self._wait_s())
        return self

    def _begin(self) -> bool:
        """Count a new attempt and return True; return False if the previous attempt succeeded."""
        if self._number and self._error is None:
            return False
        self._number += 1
        return True

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(self._on, type | tuple):
            return isinstance(error, self._on)
        return self._on(error)

    def _wait_span(self) -> OpenSpan:
        return span("waiting_to_retry", cause=type(self._error).__name__)

    def _wait_s(self) -> float:
        # Jitter keeps clients that failed at the same moment from asking again at the same moment.
        doubled = self._backoff_s * 2.0 ** (self._number - 2)
        return min(self._longest_s, doubled + random.uniform(0.0, self._backoff_s))
