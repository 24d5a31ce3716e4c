"""Waits that are booked to what they are for: a lock's to what its holder does, an idle process's to what the step does."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tasks.observe.spans import Lane, current_lane, span


class Wait:
    """A wait, in spans: a new one begins whenever what it is for changes.

    Args:
        name: of the spans.
        lane: theirs; None where nobody records.
        cause: says what the wait is for now; whoever knows that it may have changed calls `look`.
    """

    __slots__ = ("_asked", "_cause", "_lane", "_name", "_started")

    def __init__(self, name: str, lane: Lane | None, cause: Callable[[], str]) -> None:
        self._name, self._lane, self._asked = name, lane, cause
        self._cause, self._started = cause(), time.perf_counter_ns()
        if lane is not None:
            lane.opened(name)

    def look(self) -> None:
        """What it is for may have changed."""
        if (cause := self._asked()) != self._cause:
            self.cut()
            self._cause = cause

    def cut(self) -> None:
        """Keep the span so far, and go on."""
        started, self._started = self._started, time.perf_counter_ns()
        if self._lane is not None:
            self._lane.add(self._name, started, self._started, self._cause)

    def end(self) -> None:
        """Be over."""
        self.cut()
        if self._lane is not None:
            self._lane.closed(self._name)


async def waited_for(name: str, cause: str, *work: "asyncio.Future[Any]") -> None:
    """Wait until others have done their work, and book that to them; nothing where it is done. Errors are left in it."""
    if any(not each.done() for each in work):
        with span(name, cause=cause):
            await asyncio.wait(work)


class Lock:
    """A lock whose waits are `waiting_for_lock`, with what its holder does as their cause; an async context manager.

    Those who wait are served in order.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._holder: Lane | None = None
        self._waits: list[Wait] = []

    async def __aenter__(self) -> None:
        if self._lock.locked() or self._waits:
            await self._wait()
        else:
            await self._lock.acquire()
        self._hold(current_lane())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hold(None)
        self._lock.release()

    async def _wait(self) -> None:
        wait = Wait("waiting_for_lock", current_lane(), self._cause)
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
        """The innermost span of the holder's lane, or its lane where none is open."""
        return (self._holder.doing or self._holder.name) if self._holder is not None else ""

    def _look(self) -> None:
        for wait in self._waits:
            wait.look()
