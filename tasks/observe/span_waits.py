"""Record waits with their cause: what a lock's holder does, or what the step does while a process is idle."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from rollmill.tasks.observe.spans import Lane, current_lane, span


class WaitSpan:
    """Records a wait as one or more spans: a new span begins whenever the cause of the wait changes.

    Args:
        name: name of the spans.
        lane: lane of the spans; None records nothing.
        cause: returns the current cause; call `look` when it may have changed.
    """

    __slots__ = ("_asked", "_cause", "_lane", "_name", "_started")

    def __init__(self, name: str, lane: Lane | None, cause: Callable[[], str]) -> None:
        self._name, self._lane, self._asked = name, lane, cause
        self._cause, self._started = cause(), time.perf_counter_ns()
        if lane is not None:
            lane.push(name)

    def look(self) -> None:
        """Ask for the cause of the wait; if it has changed, record the span so far and begin a new one."""
        if (cause := self._asked()) != self._cause:
            self.cut()
            self._cause = cause

    def cut(self) -> None:
        """Record the time since the last span began as a span, and begin a new span with the same cause."""
        started, self._started = self._started, time.perf_counter_ns()
        if self._lane is not None:
            self._lane.add(self._name, started, self._started, self._cause)

    def end(self) -> None:
        """End the wait and record its last span."""
        self.cut()
        if self._lane is not None:
            self._lane.pop(self._name)


async def wait_for_others(name: str, cause: str, *work: "asyncio.Future[Any]") -> None:
    """Wait until the futures are done, recorded as the span `name` with its cause. Their errors are not raised."""
    if any(not each.done() for each in work):
        with span(name, cause=cause):
            await asyncio.wait(work)


class TimedLock:
    """A fair asyncio lock that records waits as `waiting_for_lock`, with the holder's current span as the cause."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._holder: Lane | None = None
        self._waits: list[WaitSpan] = []

    async def __aenter__(self) -> None:
        # A released lock may already belong to the first waiter: who comes now waits behind it.
        if self._lock.locked() or self._waits:
            await self._wait()
        else:
            await self._lock.acquire()
        self._hold(current_lane())

    async def __aexit__(self, *_: object) -> None:
        self._hold(None)
        self._lock.release()

    async def _wait(self) -> None:
        wait = WaitSpan("waiting_for_lock", current_lane(), self._cause)
        self._waits.append(wait)
        try:
            await self._lock.acquire()
        finally:
            self._waits.remove(wait)
            wait.end()

    def _hold(self, holder: Lane | None) -> None:
        if self._holder is not None:
            self._holder.watchers.remove(self._look)
        self._holder = holder
        if holder is not None:
            holder.watchers.append(self._look)
            self._look()

    def _cause(self) -> str:
        """Return the innermost open span of the holder's lane, or the lane's name if none is open."""
        return (self._holder.doing or self._holder.name) if self._holder is not None else ""

    def _look(self) -> None:
        for wait in self._waits:
            wait.look()
