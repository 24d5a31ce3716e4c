"""Control calls that go out together, and from which decision to which start that took."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from flows.failure import one_error
from tasks.observe.metrics import ALL, Metric
from tasks.observe.spans import NS, Span, current_lane

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
    """A decision that several processes carry out; made at the decision, in the lane that decides.

    Args:
        whom: who carries it out, in the plural; the span's lane is called `submitting WHOM`.
        decided_ns: when it was decided, in nanoseconds since 1970; None: now.

    Example: of two servers that begin 20 and 50 ms after the decision, the span `submitting` lasts 50 ms, and the skew is
        30 ms.
    """

    def __init__(self, whom: str, decided_ns: int | None = None) -> None:
        self._whom, self._lane = whom, current_lane()
        self._decided_ns = time.time_ns() if decided_ns is None else decided_ns
        self._starts_ns: dict[str, int] = {}

    def started(self, who: str, at_ns: int) -> None:
        """Note when one of them began, in nanoseconds since 1970; what it begins again does not count."""
        self._starts_ns.setdefault(who, at_ns)

    @property
    def n_started(self) -> int:
        """How many have begun."""
        return len(self._starts_ns)

    def book(self) -> None:
        """Book the time until the last of them began to the step that decided; nothing where none has."""
        if self._lane is None or not self._starts_ns:
            return
        recorder, until_ns = self._lane.recorder, self._last_ns - self._decided_ns
        lane, step = f"submitting {self._whom}", self._lane.step
        recorder.add(Span(recorder.process, lane, "submitting", step, self._decided_ns, until_ns))

    def metrics(self, prefix: str = "submit/") -> list[Metric]:
        """Seconds from the decision to the last start, and between the first and the last; nothing where none began."""
        if not self._starts_ns:
            return []
        values = {"last_start_s": self.last_start_s, "skew_s": self.skew_s}
        return [Metric(f"{prefix}{name}", ALL, "value", value) for name, value in values.items()]

    @property
    def last_start_s(self) -> float:
        """Seconds from the decision until the last of them began; one that has must be noted."""
        return NS * (self._last_ns - self._decided_ns)

    @property
    def skew_s(self) -> float:
        """Seconds from the first start to the last; one must be noted."""
        return NS * (self._last_ns - min(self._starts_ns.values()))

    @property
    def _last_ns(self) -> int:
        return max(self._decided_ns, *self._starts_ns.values())
