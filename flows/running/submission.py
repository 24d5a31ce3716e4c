"""Control calls that go out together, and from which decision to which start that took."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from flows.failure import one_error
from tasks.observe.metrics import ALL, Metric
from tasks.observe.spans import Span, current_lane

Result = TypeVar("Result")

AT_ONCE = 64
"""Calls that are under way at a time to one address, Prefect's API for example."""


async def together(
    calls: Iterable[Callable[[], Awaitable[Result]]], at_once: int = AT_ONCE
) -> Sequence[Result]:
    """What calls give that go out at the same time, in their order; the first that fails ends the others.

    Args:
        calls: each begins one.
        at_once: that are under way at a time.
    """
    places = asyncio.Semaphore(at_once)

    async def made(call: Callable[[], Awaitable[Result]]) -> Result:
        async with places:
            return await call()

    with one_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(made(call)) for call in calls]
    return [task.result() for task in tasks]


class Submission:
    """A decision that several processes carry out; made at the decision.

    Example: of two servers that begin 20 and 50 ms after the decision, the span `submitting` lasts 50 ms, and the skew is
        30 ms.
    """

    def __init__(self) -> None:
        self._decided_ns = time.time_ns()
        self._starts_ns: list[int] = []

    def started(self, at_ns: int) -> None:
        """Note when one of them began, in nanoseconds since 1970."""
        self._starts_ns.append(at_ns)

    def book(self) -> None:
        """Book the time until the last of them began to the current step; nothing where none has."""
        lane = current_lane()
        if lane is None or not self._starts_ns:
            return
        recorder, until_ns = lane.recorder, self._last_ns - self._decided_ns
        recorder.add(
            Span(recorder.process, "submitting", "submitting", lane.step, self._decided_ns, until_ns)
        )

    def metrics(self) -> list[Metric]:
        """Seconds from the decision to the last start, and between the first and the last; nothing where none began."""
        if not self._starts_ns:
            return []
        values = {
            "submit/last_start_s": self._last_ns - self._decided_ns,
            "submit/skew_s": self._last_ns - min(self._starts_ns),
        }
        return [Metric(name, ALL, "value", 1e-9 * value) for name, value in values.items()]

    @property
    def _last_ns(self) -> int:
        return max(self._decided_ns, *self._starts_ns)
