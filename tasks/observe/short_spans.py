"""Spans of what may take no time at all, and then is not worth one."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tasks.observe.spans import current_lane

T = TypeVar("T")

LEAST_NS = 200_000
"""A shorter stretch (0.2 ms) stays with the span that it lies in: there may be thousands of them."""


def book(name: str, started: int, cause: str = "") -> None:
    """Book the time since a moment of `time.perf_counter_ns`, unless it is too short or nobody records."""
    lane, ended = current_lane(), time.perf_counter_ns()
    if lane is not None and ended - started >= LEAST_NS:
        lane.add(name, started, ended, cause)


def timed(given: Iterable[T], name: str) -> Iterator[T]:
    """The same things, with the time that each took to come booked to `name`."""
    things, is_over = iter(given), object()
    while True:
        started = time.perf_counter_ns()
        thing = next(things, is_over)
        book(name, started)
        if thing is is_over:
            return
        yield thing  # type: ignore[misc]  # it is no such object, so it is a thing
